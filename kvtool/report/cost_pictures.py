"""Draw what variants cost: bars of bytes and speed, and the tokens that each layer keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtool.documents.results import ResultsDocument, VariantEntry
from kvtool.report import formats
from kvtool.report.costs import Spent, relative, spent_by_variant
from kvtool.report.panels import looks, new_figure
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
    _bytes(first, bars, spent)
    for panel, (name, rate) in zip(others, speeds.items(), strict=True):
        relative_of = {variant: relative(rate, cost, baseline) for variant, cost in spent.items()}
        _speed(panel, bars, relative_of)
        panel.set_title(f"{name} tokens/s, × full")
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


def _bytes(panel: Axes, bars: list[_Bar], spent: dict[str, Spent]) -> None:
    for bar in bars:
        cost = spent[bar.variant.name]
        panel.barh(bar.place, cost.kv_share, color=bar.colour, height=0.8)
        held = cost.kv_share + cost.state_share
        _outlined(panel, bar, cost.kv_share, cost.state_share, "//////")
        host = ""
        if cost.host_share:
            _outlined(panel, bar, held, cost.host_share, "....")
            host = f" + {formats.share(cost.host_share)}"
        _tell(panel, bar, held + cost.host_share, formats.share(held) + host)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    dotted = ", host memory (dotted)" if any(cost.host_share for cost in spent.values()) else ""
    panel.set_title(f"K/V bytes, policy state (hatched){dotted},\nas a share of a full cache")
    _finish(panel)


def _outlined(panel: Axes, bar: _Bar, left: float, width: float, hatch: str) -> None:
    """Add what is no key or value to a bar, where there is any."""
    panel.barh(
        bar.place,
        width,
        left=left,
        height=0.8,
        facecolor="white",
        edgecolor=bar.colour,
        hatch=hatch,
        linewidth=0.0 if width == 0 else 0.8,
    )


def _speed(panel: Axes, bars: list[_Bar], relative_of: Mapping[str, float | None]) -> None:
    for bar in bars:
        value = relative_of[bar.variant.name]
        if value is not None:
            panel.barh(bar.place, value, color=bar.colour, height=0.8)
            _tell(panel, bar, value, formats.times(value))
    _finish(panel)


def _tell(panel: Axes, bar: _Bar, value: float, text: str) -> None:
    panel.annotate(
        text,
        (value, bar.place),
        xytext=(3, 0),
        textcoords="offset points",
        va="center",
        fontsize=7.5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
    )


def _finish(panel: Axes) -> None:
    panel.axvline(1.0, color="black", linestyle="--", linewidth=1.0)
    panel.margins(x=0.2)
    panel.set_xlim(left=0)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x")
