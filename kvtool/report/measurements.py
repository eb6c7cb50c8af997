"""Show a profile: a table of its measurements, and a panel for each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from kvtool.documents.profile import MemoryTable, Metrics, ProfileDocument
from kvtool.report import formats
from kvtool.report.colour_scale import CIVIDIS
from kvtool.report.panels import (
    add_legend,
    colour_bar,
    drawing,
    heat_map,
    log_tokens,
    log_y,
    new_panels,
    save,
    whole_ticks,
)
from kvtool.report.table import Column, Table, row
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
_BAR = "#0072B2"
_LIGHTEST = 0.9  # of the colour map; its yellow end is lost on white
_NAMED = 12  # lines that the legend names at most, and the last
_LAYERS = {  # in tables; above a picture and beside its axis
    "f_variance": ("density variance F", "density variance", "F of the column sums"),
    "entropy": ("column-sum entropy", "column-sum entropy", "H / log n"),
    "query_cosine": ("cosine of neighbouring queries", "neighbouring queries", "cosine"),
    "recompute_frequency": (
        *("CaliDrop recomputes", "CaliDrop recomputes", "share of steps, 0.7 / 0.85"),
    ),
    "topk_union": ("tokens ever in the top-k", "tokens ever in the top-k", "tokens"),
    "robustness": ("early peak of attention std", "early peak of std", "share of tokens"),
    "key_basis": (
        *("key variance in 1/4 of components", "variance of keys", "share in 1/4 of components"),
    ),
    "query_centres": (
        *("length of the queries' centre", "centres of queries", "share of the mean length"),
    ),
}
_CURVES = {
    "query_cosine": ("cosine by distance", "distance (tokens)", "distances"),
    "topk_union": ("growth of the top-k union", "decoded tokens", "steps"),
    "robustness": ("std of a token's attention", "steps since it came", "steps"),
}
_Curves = Sequence[Sequence[float] | None]


class _Swept(NamedTuple):
    """A measurement of each layer at several budgets, or at several shares that are kept."""

    name: str
    title: str
    at: Sequence[float]
    rows: _Curves
    is_share: bool = False


def _swept(metrics: Metrics) -> Iterator[_Swept]:
    if (overlap := metrics.jaccard) is not None:
        for score in ("aas", "aqas", "ltas", "mas"):
            if (rows := getattr(overlap, score)) is not None:
                title = f"{score}: overlap with no eviction"
                yield _Swept(f"overlap of {score} at", title, overlap.rates, rows, is_share=True)
    if (error := metrics.output_error) is not None:
        name = f"output error, {error.policy}"
        yield _Swept(name, name, error.budgets, error.errors)
    if (lost := metrics.answer_loss) is not None:
        title = f"answer loss in nats, {lost.policy}"
        yield _Swept(f"answer loss, {lost.policy}", title, lost.budgets, lost.losses)


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
    found = [(names[0], getattr(metrics, key)) for key, names in _LAYERS.items()]
    lines = [(name, values) for name, values in found if values is not None]
    for each in _swept(metrics):
        for i, at in enumerate(each.at):
            values = [None if row is None else row[i] for row in each.rows]
            lines.append((f"{each.name} {f'{at:.0%}' if each.is_share else at}", values))
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


def measurements(
    lines: Sequence[tuple[str, list[float | None]]], title: str, numbers: Sequence[str]
) -> Table:
    """Return a row for each measurement: its layers as a bar chart, and numbers over the layers.

    Args:
        title: of the column of bar charts.
        numbers: names of `_NUMBERS`.
    """
    columns = [Column("measurement", words=True), Column(title, words=True, folds=True)]
    rows = []
    for name, values in lines:
        known = [value for value in values if value is not None]
        said = [formats.plain(_NUMBERS[each](known)) if known else "–" for each in numbers]
        rows.append(row(name, sparkline(values), *said))
    return Table([*columns, *map(Column, numbers)], rows)


def sizes(memory: MemoryTable) -> Table:
    """Return the bytes of a full cache: contexts down, batches across."""
    caption = f"keys and values of a full cache, {memory.dtype}"
    rows = [
        row(formats.tokens(tokens), *map(formats.size, line))
        for tokens, line in zip(memory.contexts, memory.bytes, strict=True)
    ]
    return Table(_batches("context", memory), rows, caption)


def _fits(memory: MemoryTable) -> Table:
    rows = [
        row(formats.size(size), *("any" if n is None else f"{n:,}" for n in line))
        for size, line in zip(memory.memory, memory.largest_context, strict=True)
    ]
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


def draw_profile(document: ProfileDocument, heads: Mapping[str, Any], path: Path) -> None:
    """Draw a profile into a file, in the format of its suffix.

    Args:
        heads: (layers, heads, ..) by name, as `kvtool.profiling.measure` returns it.
    """
    with drawing():
        save(profile_figure(document, heads), path)


def profile_figure(document: ProfileDocument, heads: Mapping[str, Any]) -> Figure:
    """Return a panel for every measurement."""
    draw = list(_panels(document, heads))
    figure, panels = new_panels(len(draw))
    for panel, fill in zip(panels, draw, strict=True):
        fill(panel)
    if any(panel.lines for panel in panels):
        add_legend(figure, panels)
    return figure


def _panels(
    document: ProfileDocument, heads: Mapping[str, Any]
) -> Iterator[Callable[[Axes], None]]:
    for name, (_, title, label) in _LAYERS.items():
        if (values := getattr(document.metrics, name)) is not None:
            yield partial(_bars, values=values, title=title, label=label)
    for name in ("f_variance", "entropy"):
        if name in heads and heads[name].shape[1] > 1:
            yield partial(_heat_map, values=heads[name], title=_LAYERS[name][0])
    for name, (title, label, axis) in _CURVES.items():
        if (curve := getattr(document.curves, name, None)) is not None:
            x = getattr(curve, axis)
            yield partial(_lines, x=x, rows=curve.values, title=title, label=label)
    for each in sorted(_swept(document.metrics), key=lambda each: each.is_share):
        yield partial(
            _lines,
            x=each.at,
            rows=each.rows,
            title=each.title,
            label="share kept" if each.is_share else "budget",
            log_x=not each.is_share,
            log_y_too=not each.is_share,
        )


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
    image = heat_map(panel, values.T)
    panel.invert_yaxis()
    panel.set_title(title)
    panel.set_xlabel("layer")
    panel.set_ylabel("query head")
    whole_ticks(panel.xaxis)
    whole_ticks(panel.yaxis)
    colour_bar(image, panel)


def _lines(
    panel: Axes,
    x: Sequence[float],
    rows: _Curves,
    title: str,
    label: str,
    *,
    log_x: bool = True,
    log_y_too: bool = False,
) -> None:
    from matplotlib import colormaps

    for layer, line in enumerate(rows):
        if line is not None:
            named = layer % -(-len(rows) // _NAMED) == 0 or layer == len(rows) - 1
            name = f"layer {layer}" if named else None
            colour = colormaps[CIVIDIS](_LIGHTEST * layer / max(1, len(rows) - 1))
            panel.plot(x, line, color=colour, linewidth=1.2, label=name)
    if log_x and len(x) > 2:
        log_tokens(panel)
    if log_y_too and min((y for line in rows for y in line or ()), default=0) > 0:
        log_y(panel)
    panel.set_title(title)
    panel.set_xlabel(label)
    panel.grid(axis="y")
