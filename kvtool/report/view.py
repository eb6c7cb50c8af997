"""Show documents in Python: as data frames, and as tables in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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
from kvtool.report.table import Column, Table, row
from kvtool.report.templates import html_table
from kvtool.report.variants import labelled

_Shown = tuple[str, list[Table], str]
"""The title of a document, its tables, and what is said below them."""


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
    title, tables, after = _SHOWN[document.kind](document)
    parts = [f"<p><b>{escape(title)}</b></p>", *map(html_table, tables)]
    return "\n".join([*parts, *([f"<p>{escape(after)}</p>"] if after else [])])


def _of_results(document: ResultsDocument) -> _Shown:
    document = labelled(document)
    costs = results.costs(document)
    gates = [results.gates(document)] if document.gates else []
    tables = [results.summary(document), *([] if costs is None else [costs]), *gates]
    unfinished = "" if document.complete else "samples are missing"
    return document.name, tables, unfinished


def _of_plan(document: PlanDocument) -> _Shown:
    return heading(document), [layer_table(document)], ""


def _of_profile(document: ProfileDocument) -> _Shown:
    tables = []
    if lines := measured(document.metrics):
        tables.append(measurements(lines, "layers", ("least", "most")))
    if (memory := document.metrics.memory) is not None:
        tables.append(replace(sizes(memory), caption=""))
    return f"profile of {document.model.id}", tables, note(document)


def _of_answers(document: GenerationDocument) -> _Shown:
    columns = list(map(Column, ("", "text", "prompt tokens", "new tokens", "kept")))
    answers: Sequence[GenerationDocument | TurnSection] = document.turns or (document,)
    rows = []
    for i, each in enumerate(answers):
        kept = formats.size(each.cache.kv_bytes)
        counts = (str(each.prompt_tokens), str(each.new_tokens))
        rows.append(row(str(i + 1), each.text, *counts, kept))
    budget = "" if document.budget is None else f", budget {document.budget}"
    title = f"{document.model}: {document.policy}{budget}"
    return title, [Table(columns, rows)], document.in_words()


_SHOWN: dict[str, Callable[[Any], _Shown]] = {
    "results": _of_results,
    "plan": _of_plan,
    "profile": _of_profile,
    "generation": _of_answers,
}
