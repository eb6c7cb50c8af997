"""Lay out a results document on a terminal: heat maps, summary, differences, verdict and claim."""

from __future__ import annotations

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.text import Text

from kvtool.documents.results import ResultsDocument
from kvtool.report.labels import labelled
from kvtool.report.needles import needle_tasks
from kvtool.report.results import gates, needles, summary_with_costs
from kvtool.report.table import Cell, Column, Row, Table
from kvtool.report.terminal import FittingTables, rich_table
from kvtool.report.words import (
    asked_in_words,
    asked_title,
    choices_in_words,
    claim_lines,
    differences_in_words,
    notes,
    verdict_lines,
)

_MOST_PAIRS = 24  # differences that a terminal shows
_MOST_HEAT_MAPS = 6  # variants whose heat maps a terminal shows; the pictures show all
_GATE_COLUMNS = (2, 0, 1, 3, 4, 5)  # the gate comes first


def summary_table(document: ResultsDocument) -> RenderableType:
    """Return what each variant scored, task by task, what it cost, and the gates."""
    parts: list[RenderableType] = [FittingTables(summary_with_costs(document))]
    if document.gates:
        parts.append(rich_table(gates(document).pick(_GATE_COLUMNS)))
    return Group(*parts, Text("\n".join(notes(document)), style="dim"))


def results_tables(document: ResultsDocument) -> RenderableType:
    """Return the summary and the verdict, below heat maps of needles if the variants are few."""
    document = labelled(document)
    summary = summary_table(document)
    few = len(document.variants) <= _MOST_HEAT_MAPS
    parts = [*([needle_tables(document)] if few else []), summary]
    claim = [Text(line) for line in claim_lines(document)]
    return Group(*parts, *_differences(document), *_verdict(document), *claim)


def _differences(document: ResultsDocument) -> list[RenderableType]:
    """Return variants compared with each other, in words; only the first of many."""
    asked, others = asked_in_words(document), differences_in_words(document)
    first = _pairs(f"{asked_title(document)}:", asked, len(asked)) if asked else []
    return [*first, *_pairs("differences on the same samples:", others, _MOST_PAIRS)]


def _pairs(title: str, found: list[tuple[str, str, str]], most: int) -> list[RenderableType]:
    rows = [Row(f"  {task}", [Cell(pair), Cell(said)]) for task, pair, said in found[:most]]
    left = len(found) - most
    more = [Text(f"  and {left} more: see report.html")] if left > 0 else []
    return [Text(title), _list(rows), *more] if found else []


def _verdict(document: ResultsDocument) -> list[RenderableType]:
    """Return the verdict: its rule, and a row for each cost."""
    lines = [Text(line) for line in verdict_lines(document)[:1]]
    rows = [Row(f"  by {title}:", [Cell(said)]) for title, said in choices_in_words(document)]
    return [*lines, _list(rows)] if rows else [*lines]


def _list(rows: list[Row]) -> RenderableType:
    """Return rows of words below each other, without titles."""
    columns = [Column("", words=True)] * (1 + len(rows[0].cells))
    return rich_table(Table(columns, rows))


def needle_tables(document: ResultsDocument) -> RenderableType:
    """Return a heat map per variant for every needle task: depths down, lengths across."""
    found = (needles(document, task) for task in needle_tasks(document))
    return Group(*(Columns(map(rich_table, tables), padding=(0, 3)) for tables in found))
