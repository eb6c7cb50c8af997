"""Build the tables of a profile: a row per measurement, its layers as a small bar chart."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from kvtool.documents.profile import MemoryTable, Metrics, ProfileDocument
from kvtool.report import formats
from kvtool.report.table import Cell, Column, Row, Table
from kvtool.report.terminal import rich_table

_BARS = "▁▂▃▄▅▆▇█"
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
    top = len(_BARS) - 1
    return "".join(
        "·" if value is None else _BARS[round((value - low) / span * top)] for value in values
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
