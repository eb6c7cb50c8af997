"""Show a profile: a table of its measurements, and a panel for each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvtool.documents.profile import MemoryTable, Metrics, ProfileDocument
from kvtool.report import formats
from kvtool.report.colour_scale import CIVIDIS
from kvtool.report.panels import add_legend, drawing, log_y, new_panels, save, whole_ticks
from kvtool.report.table import Cell, Column, Row, Table
from kvtool.report.terminal import rich_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLOCKS = "▁▂▃▄▅▆▇█"
_NUMBERS: dict[str, Callable[[Sequence[float]], float]] = {
    "least": min,
    "mean": statistics.fmean,
    "most": max,
}
_NAMES = {
    "f_variance": "density variance F",
    "entropy": "column-sum entropy",
    "query_cosine": "cosine of neighbouring queries",
    "recompute_frequency": "CaliDrop recomputes",
    "topk_union": "tokens ever in the top-k",
    "robustness": "early peak of attention std",
    "key_basis": "key variance in 1/4 of components",
    "query_centres": "length of the queries' centre",
}


def profile_table(document: ProfileDocument) -> RenderableType:
    """Return a table of the measurements, and one of the memory."""
    parts: list[RenderableType] = []
    lines = measured(document.metrics)
    if lines:
        title = f"layers 0 to {len(lines[0][1]) - 1}"
        parts.append(rich_table(measurements(lines, title, ("least", "mean", "most")), edge=False))
    if (memory := document.metrics.memory) is not None:
        parts += [rich_table(sizes(memory)), rich_table(_fits(memory))]
    parts.append(Text(note(document), style="dim"))
    return Group(*parts)


def measured(metrics: Metrics) -> list[tuple[str, list[float | None]]]:
    """Return every measurement by name with a number per layer."""
    found = [(title, getattr(metrics, name)) for name, title in _NAMES.items()]
    lines = [(title, values) for title, values in found if values is not None]
    if metrics.jaccard is not None:
        for score in ("aas", "aqas", "ltas", "mas"):
            rows = getattr(metrics.jaccard, score)
            for i, rate in enumerate(metrics.jaccard.rates if rows else ()):
                lines.append((f"overlap of {score} at {rate:.0%}", _column(rows, i)))
    if metrics.output_error is not None:
        errors = metrics.output_error
        for i, budget in enumerate(errors.budgets):
            lines.append((f"output error, {errors.policy} {budget}", _column(errors.errors, i)))
    if metrics.answer_loss is not None:
        lost = metrics.answer_loss
        for i, budget in enumerate(lost.budgets):
            lines.append((f"answer loss, {lost.policy} {budget}", _column(lost.losses, i)))
    return lines


def sparkline(values: Sequence[float | None]) -> str:
    """Draw numbers as bars from the least to the largest; a gap is a dot.

    >>> sparkline([1.0, 2.0, None, 8.0])
    '▁▂·█'
    """
    known = [value for value in values if value is not None]
    if not known:
        return "·" * len(values)
    low, span = min(known), (max(known) - min(known)) or 1.0
    top = len(_BLOCKS) - 1
    return "".join(
        "·" if value is None else _BLOCKS[round((value - low) / span * top)] for value in values
    )


def _column(rows: Sequence[Sequence[float] | None], place: int) -> list[float | None]:
    return [None if row is None else row[place] for row in rows]


def measurements(
    lines: Sequence[tuple[str, list[float | None]]], title: str, numbers: Sequence[str]
) -> Table:
    """Return a row for each measurement: its layers as a bar chart, and numbers over the layers.

    Args:
        title: of the column of bar charts.
        numbers: names of `_NUMBERS`.
    """
    columns = [Column("measurement", words=True), Column(title, words=True, folds=True)]
    return Table(
        [*columns, *map(Column, numbers)], [_measurement(*line, numbers) for line in lines]
    )


def _measurement(title: str, values: list[float | None], numbers: Sequence[str]) -> Row:
    known = [value for value in values if value is not None]
    said = [formats.plain(_NUMBERS[name](known)) if known else formats.MISSING for name in numbers]
    return Row(title, [Cell(sparkline(values)), *map(Cell, said)])


def sizes(memory: MemoryTable) -> Table:
    """Return the bytes of a full cache: contexts down, batches across."""
    caption = f"keys and values of a full cache, {memory.dtype}"
    rows = [
        Row(formats.tokens(tokens), [Cell(formats.size(size)) for size in row])
        for tokens, row in zip(memory.contexts, memory.bytes, strict=True)
    ]
    return Table(_batches("context", memory), rows, caption)


def _fits(memory: MemoryTable) -> Table:
    rows = []
    for size, row in zip(memory.memory, memory.largest_context, strict=True):
        longest = ("any" if tokens is None else f"{tokens:,}" for tokens in row)
        rows.append(Row(formats.size(size), list(map(Cell, longest))))
    return Table(_batches("memory", memory), rows, "longest context that fits")


def _batches(first: str, memory: MemoryTable) -> list[Column]:
    return [Column(first), *(Column(f"batch {size}") for size in memory.batches)]


def note(document: ProfileDocument) -> str:
    """Say what was measured, and on what."""
    model, data = document.model, document.data
    told = f"{model.id}: {formats.size(model.kv_bytes_per_token)} of keys and values per token"
    if data is None:
        return told
    decoded = f", {data.decode} decoded after each" if data.decode else ""
    return f"{told}; {data.samples} texts of {data.tokens} tokens from {data.source}{decoded}"


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
