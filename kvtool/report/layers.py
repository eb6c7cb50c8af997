"""How many tokens each layer kept: variants down, layers across."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.documents.results import ResultsDocument
from kvtool.report.colour_scale import CIVIDIS, INK, ink_on
from kvtool.report.costs import spent_by_variant
from kvtool.report.panels import new_figure, whole_ticks
from kvtool.report.variants import families

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CELL = (0.34, 0.2)  # inches
_NUMBERED = 20  # the most layers whose numbers are still legible
_LETTER = 0.07  # inches


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
    width = max(2.0, _CELL[0] * min(count, _NUMBERED))
    figure = new_figure(left + width + 1.2, _CELL[1] * len(names) + 0.9)
    panel = figure.subplots()
    most = max(max(row) for row in kept.values()) or 1.0
    image = panel.imshow(list(kept.values()), cmap=CIVIDIS, vmin=0.0, vmax=most, aspect="auto")
    panel.set_yticks(range(len(names)), names)
    if count <= _NUMBERED:
        panel.set_xticks(range(count))
        _number(panel, list(kept.values()), most)
    else:
        whole_ticks(panel.xaxis)
    panel.set_xlabel("layer (0 tokens: without attention)" if _has_none(kept) else "layer")
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=panel, aspect=18, shrink=min(1.0, 14 / len(names)))
    bar.set_label("tokens per KV head")
    bar.outline.set_visible(False)
    return figure


def _has_none(kept: dict[str, tuple[float, ...]]) -> bool:
    return any(0 in row for row in kept.values())


def _number(panel: Axes, rows: list[tuple[float, ...]], most: float) -> None:
    for y, row in enumerate(rows):
        for x, tokens in enumerate(row):
            ink = INK[ink_on(tokens / most)]
            panel.text(x, y, f"{tokens:.0f}", ha="center", va="center", fontsize=6.5, color=ink)
