"""What documents show of themselves in Python: text, data frames, tables in a notebook."""

from __future__ import annotations

import io
from functools import singledispatch
from html import escape
from importlib.util import find_spec
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from kvtool.documents.generation import GenerationDocument
from kvtool.documents.plan import PlanDocument
from kvtool.documents.profile import ProfileDocument
from kvtool.documents.results import ResultsDocument
from kvtool.errors import UsageError
from kvtool.report import formats, page_tables
from kvtool.report.kept.text import kept_text as kept_text
from kvtool.report.page_tables import Cell, Header, Row, Table
from kvtool.report.plans import heading, plan_table, stored_tokens
from kvtool.report.profile_table import measured, note, profile_table, sparkline
from kvtool.report.rows import rows_of
from kvtool.report.tables import results_tables


def text(document: Any, width: int) -> str:
    """Return what a terminal shows of a document, without colours, in lines of so many letters."""
    written = io.StringIO()
    console = Console(
        file=written, width=width, highlight=False, color_system=None, force_jupyter=False
    )
    console.print(layout(document))
    return written.getvalue()


@singledispatch
def layout(document: Any) -> RenderableType:
    """Return what rich lays out on a terminal for a document."""
    raise TypeError(f"{type(document).__name__} has no table")


layout.register(PlanDocument)(plan_table)
layout.register(ProfileDocument)(profile_table)
layout.register(ResultsDocument)(results_tables)


@layout.register
def _of_generation(document: GenerationDocument) -> RenderableType:
    return Group(Text(document.text), Text(document.in_words()))


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
    title, tables, after = _page(document)
    parts = [f"<p><b>{escape(title)}</b></p>", *map(_spell, tables)]
    return "\n".join([*parts, *([f"<p>{escape(after)}</p>"] if after else [])])


@singledispatch
def _page(document: Any) -> tuple[str, list[Table], str]:
    """Return the title of a document, its tables, and what is said below them."""
    raise TypeError(f"{type(document).__name__} has no tables")


@_page.register
def _of_results(document: ResultsDocument) -> tuple[str, list[Table], str]:
    costs = page_tables.costs(document)
    gates = [page_tables.gates(document)] if document.gates else []
    tables = [page_tables.summary(document), *([] if costs is None else [costs]), *gates]
    unfinished = "" if document.complete else "samples are missing"
    return document.name, tables, unfinished


@_page.register
def _of_plan(document: PlanDocument) -> tuple[str, list[Table], str]:
    stored, prompt = stored_tokens(document), document.target.prompt_tokens
    rows = [
        Row(str(i), [Cell(kind), Cell(str(tokens)), Cell(formats.share(tokens / prompt))])
        for i, (kind, tokens) in enumerate(zip(document.model.layer_types, stored, strict=True))
    ]
    headers = [Header(title) for title in ("layer", "type", "tokens", "of prompt")]
    return heading(document), [Table(headers, rows)], ""


@_page.register
def _of_profile(document: ProfileDocument) -> tuple[str, list[Table], str]:
    tables = []
    lines = measured(document.metrics)
    if lines:
        headers = [Header(title) for title in ("measurement", "layers", "least", "most")]
        tables.append(Table(headers, [_measurement(*line) for line in lines]))
    memory = document.metrics.memory
    if memory is not None:
        headers = [Header("context"), *(Header(f"batch {rows}") for rows in memory.batches)]
        sizes = zip(memory.contexts, memory.bytes, strict=True)
        rows = [
            Row(formats.tokens(n), [Cell(formats.size(each)) for each in row]) for n, row in sizes
        ]
        tables.append(Table(headers, rows))
    return f"profile of {document.model.id}", tables, note(document)


def _measurement(title: str, values: list[float | None]) -> Row:
    known = [value for value in values if value is not None]
    ends = (
        [formats.plain(min(known)), formats.plain(max(known))] if known else [formats.MISSING] * 2
    )
    return Row(title, [Cell(sparkline(values)), *map(Cell, ends)])


@_page.register
def _of_answers(document: GenerationDocument) -> tuple[str, list[Table], str]:
    headers = [Header(title) for title in ("", "text", "prompt tokens", "new tokens", "kept")]
    answers = document.turns or (document,)
    rows = [Row(str(i + 1), _answer(each)) for i, each in enumerate(answers)]
    budget = "" if document.budget is None else f", budget {document.budget}"
    title = f"{document.model}: {document.policy}{budget}"
    return title, [Table(headers, rows)], document.in_words()


def _answer(answer: Any) -> list[Cell]:
    counts = (str(answer.prompt_tokens), str(answer.new_tokens))
    told = (answer.text, *counts, formats.size(answer.cache.kv_bytes))
    return [Cell(each) for each in told]


def _spell(table: Table) -> str:
    """Write a table in HTML."""
    heads = "".join(map(_spell_header, table.headers))
    rows = "\n".join(
        f"<tr><th>{escape(row.head)}</th>{''.join(map(_spell_cell, row.cells))}</tr>"
        for row in table.rows
    )
    return f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"


def _spell_header(header: Header) -> str:
    below = f"<br><small>{escape(header.below)}</small>" if header.below else ""
    return f"<th>{escape(header.title)}{below}</th>"


def _spell_cell(cell: Cell) -> str:
    notes = "".join(f" <small>{escape(each.text)}</small>" for each in cell.notes)
    return f"<td>{escape(cell.text)}{notes}</td>"
