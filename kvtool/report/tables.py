"""A results document as tables for a terminal; they read without colour too.

Tables are as wide as the terminal allows: one for everything where it fits, else one per suite.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtool.documents.results import GateResult, ResultsDocument, TaskResult, VariantEntry
from kvtool.report import formats
from kvtool.report.colour_scale import colour_at, ink_on
from kvtool.report.costs import relative, spent_by_variant
from kvtool.report.needles import NeedleGrid, needle_grids, needle_tasks, scale
from kvtool.report.variants import (
    FULL,
    families,
    full_variant,
    results_of,
    suite,
    task_names,
    variants_in_order,
    wrap,
)
from kvtool.report.words import (
    choices_in_words,
    claim_lines,
    differences_in_words,
    notes,
    verdict_lines,
)

_MOST_PAIRS = 24  # differences that a terminal shows
_FEW_ARMS = 6  # whose heat maps a terminal shows; the pictures show all
_STYLES = {"better": "green", "worse": "red", "": ""}


@dataclass(frozen=True)
class _Column:
    header: str
    cells: list[Text]


def summary_table(document: ResultsDocument) -> RenderableType:
    """Return what each variant scored, task by task, what it cost, and the gates."""
    parts: list[RenderableType] = [_Summary(document)]
    if document.gates:
        parts.append(_gates(document.gates))
    return Group(*parts, Text("\n".join(notes(document)), style="dim"))


def results_tables(document: ResultsDocument) -> RenderableType:
    """Return the summary and the verdict, below heat maps of needles if the arms are few."""
    summary = summary_table(document)
    few = len(document.arms) <= _FEW_ARMS
    parts = [*([needle_tables(document)] if few else []), summary]
    claim = [Text(line) for line in claim_lines(document)]
    return Group(*parts, *_differences(document), *_verdict(document), *claim)


def _differences(document: ResultsDocument) -> list[RenderableType]:
    """Return arms held against each other, in words; only the first of many."""
    found = differences_in_words(document)
    table = Table.grid(padding=(0, 1))
    for task, pair, said in found[:_MOST_PAIRS]:
        table.add_row(Text(f"  {task}", no_wrap=True), Text(pair), Text(said))
    left = len(found) - _MOST_PAIRS
    more = [Text(f"  and {left} more: see report.html")] if left > 0 else []
    return [Text("differences on the same samples:"), table, *more] if found else []


def _verdict(document: ResultsDocument) -> list[RenderableType]:
    """Return the verdict: its rule, and a row for each cost."""
    lines, choices = verdict_lines(document), Table.grid(padding=(0, 1))
    for title, said in choices_in_words(document):
        choices.add_row(Text(f"  by {title}:", no_wrap=True), Text(said))
    return [*map(Text, lines[:1]), *([choices] if choices.rows else [])]


def needle_tables(document: ResultsDocument) -> RenderableType:
    """Return a heat map per variant for every needle task: depths down, lengths across."""
    parts: list[RenderableType] = []
    for task in needle_tasks(document):
        grids = needle_grids(document, task)
        tables = [
            _needle_table(result, grids[result.arm])
            for result in results_of(document, task)
            if result.arm in grids
        ]
        parts.append(Columns(tables, padding=(0, 3)))
    return Group(*parts)


class _Summary:
    """Score and cost columns, in as many tables as the width asks for."""

    def __init__(self, document: ResultsDocument) -> None:
        self.document = document

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        groups = _groups(self.document)
        pages: list[list[_Column]] = []
        for group in groups:
            whole = [*pages[-1], *group] if pages else group
            if self._fits(whole, console, options):
                pages[-1:] = [whole]
                continue
            pages.append([])
            for column in group:
                if pages[-1] and not self._fits([*pages[-1], column], console, options):
                    pages.append([])
                pages[-1].append(column)
        for page in pages:
            yield self._table(page, options)

    def _fits(self, columns: list[_Column], console: Console, options: ConsoleOptions) -> bool:
        unlimited = options.update(width=10_000)
        table = self._table(columns, options)
        return console.measure(table, options=unlimited).maximum <= options.max_width

    def _table(self, columns: list[_Column], options: ConsoleOptions) -> Table:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold")
        table.add_column("arm")
        for column in columns:
            table.add_column(Text(column.header), justify="right", overflow="fold")
        row = 0
        width = max(16, options.max_width // 4)
        found = families(self.document)
        sweep = any(len(family.variants) > 1 for family in found)
        for family in found:
            for variant in family.variants:
                last = sweep and variant is family.variants[-1]
                cells = [column.cells[row] for column in columns]
                table.add_row(Text(wrap(variant.name, width)), *cells, end_section=last)
                row += 1
        return table


def _groups(document: ResultsDocument) -> list[list[_Column]]:
    """Return the columns that belong together: a suite's with its mean, then the cost."""
    variants = variants_in_order(document)
    by_suite: dict[str, list[_Column]] = {}
    for task in task_names(document):
        by_suite.setdefault(suite(task), []).append(_score_column(document, task, variants))
    for name in dict.fromkeys(a.suite for a in document.averages if len(a.tasks) > 1):
        by_suite.setdefault(name, []).append(_average_column(document, name, variants))
    groups = [group for group in by_suite.values() if group]
    cost = _cost_columns(document, variants)
    return [*groups, cost] if cost else groups


def _score_column(document: ResultsDocument, task: str, variants: list[VariantEntry]) -> _Column:
    found = [document.of(variant.name, task) for variant in variants]
    some = next(result for result in found if result is not None)
    header = f"{task.replace('/', chr(10), 1)}\n{some.metric} {formats.direction(some)}"
    parts = [
        _score_parts(result, variant.policy == FULL)
        for variant, result in zip(variants, found, strict=True)
    ]
    widths = [max(len(part[i]) for part in parts) for i in range(4)]
    cells = []
    for result, (value, delta, interval, failed) in zip(found, parts, strict=True):
        text = Text(value.rjust(widths[0]))
        style = _STYLES[formats.tone(result)] if result else ""
        if widths[1]:
            text.append(" ").append(delta.rjust(widths[1]), style)
        if widths[2]:
            text.append(" ").append(interval.ljust(widths[2]))
        if widths[3]:
            text.append(" ").append(failed.ljust(widths[3]), "bold red")
        cells.append(text)
    return _Column(header, cells)


def _score_parts(result: TaskResult | None, is_full: bool) -> tuple[str, str, str, str]:
    if result is None:
        return formats.MISSING, "", "", ""
    return (
        formats.score(result.value, result.best) + _error(result),
        "" if is_full else formats.signed(result.delta, result.best),
        _interval(result),
        f"!{result.failed}" if result.failed else "",
    )


def _error(result: TaskResult) -> str:
    """Return the standard error where no difference to the full cache says more."""
    return formats.stderr(result.stderr, result.best) if result.paired is None else ""


def _interval(result: TaskResult) -> str:
    pair = result.paired
    return "" if pair is None else formats.interval(pair.low, pair.high, result.best)


def _average_column(document: ResultsDocument, name: str, variants: list[VariantEntry]) -> _Column:
    averages = {average.arm: average for average in document.averages if average.suite == name}
    tasks = len(next(iter(averages.values())).tasks)
    sample = next(
        result for a in averages.values() for result in document.results if result.task in a.tasks
    )
    cells = []
    for variant in variants:
        average = averages.get(variant.name)
        if average is None:
            cells.append(Text(formats.MISSING))
            continue
        delta = "" if variant.policy == FULL else formats.signed(average.delta, sample.best)
        tone = formats.tone(sample.model_copy(update={"delta": average.delta}))
        text = Text(formats.score(average.value, sample.best))
        cells.append(text.append(" ").append(delta.rjust(6), _STYLES[tone]))
    return _Column(f"{name}\nmean of {tasks}", cells)


def _cost_columns(document: ResultsDocument, variants: list[VariantEntry]) -> list[_Column]:
    spent = spent_by_variant(document)
    full = full_variant(document)
    baseline = spent.get(full.name) if full else None
    rows = []
    for variant in variants:
        cost = spent.get(variant.name)
        if cost is None:
            rows.append([formats.MISSING] * 4)
            continue
        ratio = relative("decode_rate", cost, baseline)
        smaller = cost.times_smaller(baseline)
        rows.append(
            [
                f"{formats.size(cost.kv_bytes)} {formats.share(cost.kv_share):>4}",
                formats.size(cost.held_bytes)
                + (f" {formats.times(smaller):>6}" if smaller is not None else " " * 7),
                formats.plain(cost.prefill_s),
                (formats.MISSING if cost.decode_rate is None else formats.plain(cost.decode_rate))
                + (f" {formats.times(ratio):>5}" if ratio is not None else " " * 6),
            ]
        )
    headers = ("K/V\nof full", "held\nsmaller", "prefill\ns", "decode\ntokens/s")
    return [
        _Column(header, [Text(row[i]) for row in rows]) for i, header in enumerate(headers) if spent
    ]


def _needle_table(result: TaskResult, grid: NeedleGrid) -> Table:
    best = scale(result)
    places = 2 if best <= 1 else 0
    mean = formats.score(result.value, result.best)
    title = Text(f"{wrap(result.arm, 28)}\n{result.task} {mean}")
    width = max(map(len, title.plain.split("\n")))
    table = Table(
        box=None, padding=0, pad_edge=False, title=title, title_style="bold", min_width=width
    )
    table.add_column("depth", justify="right")
    for length in grid.lengths:
        table.add_column(f" {length}", justify="right", overflow="fold")
    for depth, row in zip(grid.depths, grid.values, strict=True):
        cells = [Text(f"{depth:g}%")]
        for value in row:
            if value is None:
                cells.append(Text(formats.MISSING))
                continue
            red, green, blue = colour_at(value / best)
            cells.append(
                Text(f" {value:.{places}f}", f"{ink_on(value / best)} on rgb({red},{green},{blue})")
            )
        table.add_row(*cells)
    return table


def _gates(gates: list[GateResult]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for header in ("gate", "arm", "task"):
        table.add_column(header, overflow="fold")
    for header in ("value", "limit"):
        table.add_column(header, justify="right")
    table.add_column("")
    for gate in gates:
        outcome = Text("passed", "green") if gate.passed else Text("FAILED", "bold red")
        value = formats.MISSING if gate.value is None else formats.plain(gate.value)
        table.add_row(
            Text(formats.gate_name(gate)),
            Text(gate.arm),
            Text(gate.task),
            value,
            formats.plain(gate.limit),
            outcome,
        )
    return table
