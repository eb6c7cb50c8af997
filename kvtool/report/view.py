"""Show documents in Python: as data frames, and as tables in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import singledispatch
from html import escape
from importlib.util import find_spec
from typing import Any

from kvtool.documents.generation import GenerationDocument, TurnSection
from kvtool.documents.plan import PlanDocument
from kvtool.documents.profile import ProfileDocument
from kvtool.documents.results import ResultsDocument
from kvtool.errors import UsageError
from kvtool.report import formats, results
from kvtool.report.measurements import measured, measurements, note, sizes
from kvtool.report.plans import heading, layer_table
from kvtool.report.rows import rows_of
from kvtool.report.table import Cell, Column, Row, Table
from kvtool.report.variants import labelled


def frame(document: Any) -> Any:
    """Return the rows of a document as a pandas data frame.

    Raises:
        UsageError: pandas is not installed.
    """
    if find_spec("pandas") is None:
        raise UsageError("to_pandas needs pandas", hint="pip install pandas")
    import pandas

    return pandas.DataFrame(rows_of(document))


def html(document: Any) -> str:
    """Return what a notebook shows of a document."""
    title, tables, after = _shown(document)
    parts = [f"<p><b>{escape(title)}</b></p>", *map(html_table, tables)]
    return "\n".join([*parts, *([f"<p>{escape(after)}</p>"] if after else [])])


def html_table(table: Table) -> str:
    """Write a table in HTML, without its looks, since a notebook has styles of its own."""
    caption = f"<caption>{escape(table.caption)}</caption>\n" if table.caption else ""
    heads = "".join(map(_head, table.columns))
    rows = "\n".join(
        f"<tr><th>{escape(row.head)}</th>{''.join(map(_cell, row.cells))}</tr>"
        for row in table.rows
    )
    return f"<table>\n{caption}<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"


def _head(column: Column) -> str:
    below = f"<br><small>{escape(column.below)}</small>" if column.below else ""
    return f"<th>{escape(column.title)}{below}</th>"


def _cell(cell: Cell) -> str:
    notes = "".join(f" <small>{escape(each.text)}</small>" for each in cell.written_notes)
    return f"<td>{escape(cell.text)}{notes}</td>"


@singledispatch
def _shown(document: Any) -> tuple[str, list[Table], str]:
    """Return the title of a document, its tables, and what is said below them."""
    raise TypeError(f"{type(document).__name__} has no tables")


@_shown.register
def _of_results(document: ResultsDocument) -> tuple[str, list[Table], str]:
    document = labelled(document)
    costs = results.costs(document)
    gates = [results.gates(document)] if document.gates else []
    tables = [results.summary(document), *([] if costs is None else [costs]), *gates]
    unfinished = "" if document.complete else "samples are missing"
    return document.name, tables, unfinished


@_shown.register
def _of_plan(document: PlanDocument) -> tuple[str, list[Table], str]:
    return heading(document), [layer_table(document)], ""


@_shown.register
def _of_profile(document: ProfileDocument) -> tuple[str, list[Table], str]:
    tables = []
    if lines := measured(document.metrics):
        tables.append(measurements(lines, "layers", ("least", "most")))
    if (memory := document.metrics.memory) is not None:
        tables.append(replace(sizes(memory), caption=""))
    return f"profile of {document.model.id}", tables, note(document)


@_shown.register
def _of_answers(document: GenerationDocument) -> tuple[str, list[Table], str]:
    columns = list(map(Column, ("", "text", "prompt tokens", "new tokens", "kept")))
    answers: Sequence[GenerationDocument | TurnSection] = document.turns or (document,)
    rows = []
    for i, each in enumerate(answers):
        counts = (str(each.prompt_tokens), str(each.new_tokens))
        cells = map(Cell, (each.text, *counts, formats.size(each.cache.kv_bytes)))
        rows.append(Row(str(i + 1), list(cells)))
    budget = "" if document.budget is None else f", budget {document.budget}"
    title = f"{document.model}: {document.policy}{budget}"
    return title, [Table(columns, rows)], document.in_words()
