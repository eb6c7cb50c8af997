"""A profile as one picture: a bar per layer, curves by layer, heat maps of layers and heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.documents.profile import ProfileDocument
from kvtool.report import formats
from kvtool.report.colour_scale import CIVIDIS
from kvtool.report.panels import add_legend, drawing, log_y, new_panels, save, whole_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR = "#0072B2"
_LIGHTEST = 0.9  # of the colour map; its yellow end is lost on white
_NAMED = 12  # lines that the legend names at most, and the last
_SCORES = ("aas", "aqas", "ltas", "mas")
_BARS = {
    "f_variance": ("density variance", "F of the column sums"),
    "entropy": ("column-sum entropy", "H / log n"),
    "query_cosine": ("neighbouring queries", "cosine"),
    "recompute_frequency": ("CaliDrop recomputes", "share of steps, 0.7 / 0.85"),
    "topk_union": ("tokens ever in the top-k", "tokens"),
    "robustness": ("early peak of std", "share of tokens"),
    "key_basis": ("variance of keys", "share in 1/4 of components"),
    "query_centres": ("centres of queries", "share of the mean length"),
}
_CURVES = {
    "query_cosine": ("cosine by distance", "distance (tokens)", "distances"),
    "topk_union": ("growth of the top-k union", "decoded tokens", "steps"),
    "robustness": ("std of a token's attention", "steps since it came", "steps"),
}
_MAPS = {"f_variance": "density variance F", "entropy": "column-sum entropy"}


def draw_profile(document: ProfileDocument, heads: Mapping[str, Any], path: Path) -> None:
    """Draw a profile into a file, in the format of its suffix.

    Args:
        heads: (layers, heads, ..) by name, as `kvtool.profiling.measure` returns it.
    """
    with drawing():
        save(profile_figure(document, heads), path)


def profile_figure(document: ProfileDocument, heads: Mapping[str, Any]) -> Figure:
    """Return a panel for every measurement."""
    draw = [*_bar_panels(document), *_map_panels(heads), *_curve_panels(document)]
    figure, panels = new_panels(len(draw))
    for panel, fill in zip(panels, draw, strict=True):
        fill(panel)
    if any(panel.lines for panel in panels):
        add_legend(figure, panels)
    return figure


def _bar_panels(document: ProfileDocument) -> list[Callable[[Axes], None]]:
    found: list[Callable[[Axes], None]] = []
    for name, (title, label) in _BARS.items():
        values = getattr(document.metrics, name)
        if values is not None:
            found.append(partial(_bars, values=values, title=title, label=label))
    return found


def _map_panels(heads: Mapping[str, Any]) -> list[Callable[[Axes], None]]:
    return [
        partial(_heat_map, values=heads[name], title=title)
        for name, title in _MAPS.items()
        if name in heads and heads[name].shape[1] > 1
    ]


def _curve_panels(document: ProfileDocument) -> list[Callable[[Axes], None]]:
    found: list[Callable[[Axes], None]] = []
    for name, (title, label, axis) in _CURVES.items():
        curve = getattr(document.curves, name, None)
        if curve is not None:
            x, rows = getattr(curve, axis), curve.values
            found.append(partial(_lines, x=x, rows=rows, title=title, label=label))
    if document.metrics.output_error is not None:
        error = document.metrics.output_error
        title = f"output error, {error.policy}"
        found.append(partial(_errors, x=error.budgets, rows=error.errors, title=title))
    if document.metrics.answer_loss is not None:
        lost = document.metrics.answer_loss
        title = f"answer loss in nats, {lost.policy}"
        found.append(partial(_errors, x=lost.budgets, rows=lost.losses, title=title))
    if document.metrics.jaccard is not None:
        overlap = document.metrics.jaccard
        for score in _SCORES:
            rows = getattr(overlap, score)
            if rows is not None:
                title = f"{score}: overlap with no eviction"
                shape = {"x": overlap.rates, "rows": rows, "title": title}
                found.append(partial(_lines, **shape, label="share kept", log=False))
    return found


def _bars(panel: Axes, values: Sequence[float | None], title: str, label: str) -> None:
    heights = [math.nan if value is None else value for value in values]
    panel.bar(range(len(heights)), heights, color=_BAR, width=0.8)
    panel.set_title(title)
    panel.set_xlabel("layer")
    panel.set_ylabel(label)
    whole_ticks(panel.xaxis)
    known = [value for value in values if value is not None]
    if known and min(known) > 0 and max(known) > 100 * min(known):
        log_y(panel)
    panel.grid(axis="y")


def _heat_map(panel: Axes, values: Any, title: str) -> None:
    image = panel.imshow(values.T, cmap=CIVIDIS, aspect="auto", origin="lower")
    panel.set_title(title)
    panel.set_xlabel("layer")
    panel.set_ylabel("query head")
    for axis in (panel.xaxis, panel.yaxis):
        whole_ticks(axis)
    panel.spines[:].set_visible(False)
    bar = panel.figure.colorbar(image, ax=panel, aspect=18)
    bar.outline.set_visible(False)


def _lines(
    panel: Axes,
    x: Sequence[float],
    rows: Sequence[Sequence[float] | None],
    title: str,
    label: str,
    *,
    log: bool = True,
) -> None:
    for layer, row in enumerate(rows):
        if row is not None:
            named = layer % -(-len(rows) // _NAMED) == 0 or layer == len(rows) - 1
            name = f"layer {layer}" if named else None
            panel.plot(x, row, color=_colour(layer, len(rows)), linewidth=1.2, label=name)
    if log and len(x) > 2:
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda value, _: formats.tokens(value))
        panel.minorticks_off()
    panel.set_title(title)
    panel.set_xlabel(label)
    panel.grid(axis="y")


def _errors(
    panel: Axes, x: Sequence[int], rows: Sequence[Sequence[float] | None], title: str
) -> None:
    _lines(panel, x, rows, title, "budget")
    known = [value for row in rows if row is not None for value in row]
    if known and min(known) > 0:
        log_y(panel)


def _colour(layer: int, layers: int) -> tuple:
    from matplotlib import colormaps

    return colormaps[CIVIDIS](_LIGHTEST * layer / max(1, layers - 1))
