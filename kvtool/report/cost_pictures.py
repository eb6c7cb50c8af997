"""Draw what variants cost: bars of bytes and speed, and the tokens that each layer keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtool.documents.results import ResultsDocument, VariantEntry
from kvtool.evaluation.costs import Spent, relative, spent_by_variant
from kvtool.report import formats
from kvtool.report.panels import colour_bar, heat_map, looks, new_figure, whole_ticks
from kvtool.report.variants import families, full_variant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR = 0.19  # inches
_GAP = 0.6  # bars
_LETTER = 0.07  # inches


@dataclass(frozen=True)
class _Bar:
    variant: VariantEntry
    place: float
    colour: str


def cost_figure(document: ResultsDocument) -> Figure:
    """Return a bar per variant for bytes, prefill and decode speed, grouped by policy.

    Bytes are a share of what a full cache would hold in the same samples; the policy's own state
    is hatched, evicted tokens in host memory are dotted. Speeds are multiples of the full
    variant's, left out without one.
    """
    spent = spent_by_variant(document)
    bars = _bars(document, spent)
    full = full_variant(document)
    baseline = spent.get(full.name) if full else None
    speeds = {} if baseline is None else {"decode": "decode_rate", "prefill": "prefill_rate"}
    names = [bar.variant.name for bar in bars]
    width = 0.3 + _LETTER * max(len(name) for name in names) + 2.6 * (1 + len(speeds))
    figure = new_figure(width, _BAR * (bars[-1].place + 1) + 1.0)
    first, *others = figure.subplots(1, 1 + len(speeds), sharey=True, squeeze=False)[0]
    for bar in bars:
        cost = spent[bar.variant.name]
        kv, state, host = map(cost.share, (cost.kv_bytes, cost.state_bytes, cost.host_bytes))
        beside = f" + {formats.share(host)}" if host else ""
        sizes = (kv, state, host) if host else (kv, state)
        _draw(first, bar, sizes, formats.share(kv + state) + beside)
    first.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    dotted = ", host memory (dotted)" if any(cost.host_bytes for cost in spent.values()) else ""
    first.set_title(f"K/V bytes, policy state (hatched){dotted},\nas a share of a full cache")
    for panel, (name, rate) in zip(others, speeds.items(), strict=True):
        for bar in bars:
            if (value := relative(rate, spent[bar.variant.name], baseline)) is not None:
                _draw(panel, bar, (value,), formats.times(value))
        panel.set_title(f"{name} tokens/s, × full")
    for panel in (first, *others):
        panel.axvline(1.0, color="black", linestyle="--", linewidth=1.0)
        panel.margins(x=0.2)
        panel.set_xlim(left=0)
        panel.tick_params(axis="y", length=0)
        panel.grid(axis="x")
    first.set_yticks([bar.place for bar in bars], names)
    first.set_ylim(bars[-1].place + 0.7, -0.7)
    return figure


def _bars(document: ResultsDocument, spent: dict[str, Spent]) -> list[_Bar]:
    look = looks(document)
    found = []
    place = 0.0
    sweep = any(len(family.variants) > 1 for family in families(document))
    for family in families(document):
        variants = [variant for variant in family.variants if variant.name in spent]
        for variant in variants:
            found.append(_Bar(variant, place, look[family.label].colour))
            place += 1
        place += _GAP if variants and sweep else 0
    return found


def _draw(panel: Axes, bar: _Bar, sizes: Sequence[float], told: str) -> None:
    """Draw the parts of a bar behind each other, the first one filled, and a word at its end."""
    left = 0.0
    for size, hatch in zip(sizes, ("", "//////", "...."), strict=False):
        outlined = {"facecolor": "white", "edgecolor": bar.colour, "hatch": hatch}
        look = outlined | {"linewidth": 0.8 if size else 0.0} if hatch else {"color": bar.colour}
        panel.barh(bar.place, size, left=left, height=0.8, **look)
        left += size
    panel.annotate(
        told,
        (left, bar.place),
        xytext=(3, 0),
        textcoords="offset points",
        va="center",
        fontsize=7.5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
    )


_LAYER_CELL = (0.34, 0.2)  # inches
_MOST_LAYERS = 20  # the most layers whose numbers are still legible
_LABEL_ROWS = 4  # from which on the label of the colours fits upright beside them


def kept_by_layer(document: ResultsDocument) -> dict[str, tuple[float, ...]]:
    """Return the mean tokens of each layer by variant, of those that recorded them.

    Names say of variants whose budget is read that the tokens are those stored.
    """
    spent = spent_by_variant(document)
    return {
        f"{variant.name} (stored)" if variant.reads else variant.name: spent[variant.name].kept
        for family in families(document)
        for variant in family.variants
        if variant.name in spent and spent[variant.name].kept
    }


def layers_figure(document: ResultsDocument) -> Figure:
    """Return a row of numbers for each variant: what its layers kept, the mean of all samples."""
    kept = kept_by_layer(document)
    names, count = list(kept), len(next(iter(kept.values())))
    left = _LETTER * max(map(len, names))
    width = max(2.0, _LAYER_CELL[0] * min(count, _MOST_LAYERS))
    few = len(names) < _LABEL_ROWS
    figure = new_figure(left + width + (1.7 if few else 1.2), _LAYER_CELL[1] * len(names) + 0.9)
    panel = figure.subplots()
    most = max(max(row) for row in kept.values()) or 1.0
    says = (lambda tokens: f"{tokens:.0f}") if count <= _MOST_LAYERS else None
    image = heat_map(panel, list(kept.values()), most=most, says=says)
    panel.set_yticks(range(len(names)), names)
    if says is not None:
        panel.set_xticks(range(count))
    else:
        whole_ticks(panel.xaxis)
    none = any(0 in row for row in kept.values())
    panel.set_xlabel("layer (0 tokens: without attention)" if none else "layer")
    bar = colour_bar(image, panel, shrink=min(1.0, 14 / len(names)))
    if few:
        bar.set_label("tokens per\nKV head", rotation=0, ha="left", va="center")
    else:
        bar.set_label("tokens per KV head")
    return figure
