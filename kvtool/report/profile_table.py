"""A profile as tables for a terminal: a line per measurement, its layers as a small bar chart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtool.documents.profile import MemoryTable, Metrics, ProfileDocument
from kvtool.report import formats

_BARS = "▁▂▃▄▅▆▇█"
_NAMES = {
    "f_variance": "density variance F",
    "entropy": "column-sum entropy",
    "query_cosine": "cosine of neighbouring queries",
    "recompute_frequency": "CaliDrop recomputes",
    "topk_union": "tokens ever in the top-k",
    "robustness": "early peak of attention std",
    "key_basis": "key variance in 1/4 of components",
}


def profile_table(document: ProfileDocument) -> RenderableType:
    """Return a table of the measurements, and one of the memory."""
    parts: list[RenderableType] = []
    lines = measured(document.metrics)
    if lines:
        parts.append(_measurements(lines))
    if document.metrics.memory is not None:
        parts += [_sizes(document.metrics.memory), _fits(document.metrics.memory)]
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


def _measurements(lines: list[tuple[str, list[float | None]]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("measurement")
    table.add_column(f"layers 0 to {len(lines[0][1]) - 1}", overflow="fold")
    for name in ("least", "mean", "most"):
        table.add_column(name, justify="right")
    for title, values in lines:
        known = [value for value in values if value is not None]
        if not known:
            table.add_row(title, sparkline(values), *[formats.MISSING] * 3)
            continue
        numbers = (min(known), statistics.fmean(known), max(known))
        table.add_row(title, sparkline(values), *map(formats.plain, numbers))
    return table


def _sizes(memory: MemoryTable) -> Table:
    table = _grid(f"keys and values of a full cache, {memory.dtype}", "context", memory.batches)
    for tokens, row in zip(memory.contexts, memory.bytes, strict=True):
        table.add_row(formats.tokens(tokens), *map(formats.size, row))
    return table


def _fits(memory: MemoryTable) -> Table:
    table = _grid("longest context that fits", "memory", memory.batches)
    for size, row in zip(memory.memory, memory.largest_context, strict=True):
        told = ("any" if tokens is None else f"{tokens:,}" for tokens in row)
        table.add_row(formats.size(size), *told)
    return table


def _grid(title: str, first: str, batches: Sequence[int]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, justify="right")
    for rows in batches:
        table.add_column(f"batch {rows}", justify="right")
    return table


def note(document: ProfileDocument) -> str:
    """Say what was measured, and on what."""
    model, data = document.model, document.data
    told = f"{model.id}: {formats.size(model.kv_bytes_per_token)} of keys and values per token"
    if data is None:
        return told
    decoded = f", {data.decode} decoded after each" if data.decode else ""
    return f"{told}; {data.samples} texts of {data.tokens} tokens from {data.source}{decoded}"
