"""Write a results document for a terminal, as CSV, LaTeX or Markdown, and for RULER's board.

The board is kvpress' leaderboard (https://huggingface.co/spaces/nvidia/kvpress-leaderboard): a row
for each method and compression ratio, with the dataset, its length (`data_dir`), the model, RULER's
tasks under their own names in alphabetical order, and their mean as `score`.
"""

from __future__ import annotations

import csv
import io
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.text import Text

from kvtool.documents.results import ResultsDocument, TaskResult
from kvtool.errors import UsageError
from kvtool.report.needles import needle_tasks
from kvtool.report.results import gates, needles, summary_with_costs
from kvtool.report.rows import rows_of
from kvtool.report.table import Cell, Table
from kvtool.report.terminal import FittingTables, rich_table
from kvtool.report.variants import labelled
from kvtool.report.words import (
    asked_title,
    claim_line,
    claim_table,
    differences_table,
    notes,
    verdict_lines,
)

_MOST_PAIRS = 24  # differences that a terminal shows
_MOST_HEAT_MAPS = 6  # variants whose heat maps a terminal shows; the pictures show all


def summary_table(document: ResultsDocument) -> RenderableType:
    """Return what each variant scored, task by task, what it cost, and the gates."""
    parts: list[RenderableType] = [FittingTables(summary_with_costs(document))]
    if document.gates:
        parts.append(rich_table(gates(document)))
    return Group(*parts, Text("\n".join(notes(document)), style="dim"))


def results_tables(document: ResultsDocument) -> RenderableType:
    """Return the summary and the verdict, below heat maps of needles if the variants are few."""
    document = labelled(document)
    few = len(document.variants) <= _MOST_HEAT_MAPS
    parts = [*([needle_tables(document)] if few else []), summary_table(document)]
    asked, others = (differences_table(document, asked=asked) for asked in (True, False))
    if asked.rows:
        parts += [Text(f"{asked_title(document)}:"), rich_table(asked)]
    if others.rows:
        first = replace(others, rows=others.rows[:_MOST_PAIRS])
        parts += [Text("differences on the same samples:"), rich_table(first)]
    if (left := len(others.rows) - _MOST_PAIRS) > 0:
        parts.append(Text(f"  and {left} more: see report.html"))
    verdict, *choices = verdict_lines(document) or [""]
    if verdict:
        parts.append(Text("\n".join([verdict, *choices])))
    if said := claim_line(document):
        parts.append(Text(f"claim: {said}"))
    if document.claim_verdict is not None:
        parts.append(rich_table(claim_table(document.claim_verdict)))
    return Group(*parts)


def needle_tables(document: ResultsDocument) -> RenderableType:
    """Return a heat map per variant for every needle task: depths down, lengths across."""
    found = (needles(document, task) for task in needle_tasks(document))
    return Group(*(Columns(map(rich_table, tables), padding=(0, 3)) for tables in found))


_SPECIAL = {  # of LaTeX
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    "±": r"$\pm$",
    "×": r"$\times$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "°": r"$^{\circ}$",
    "–": "--",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
}


def exported(document: ResultsDocument, form: str) -> str:
    """Return the results as `csv`, `latex` or `markdown`, ending in a newline.

    CSV has a row for each variant and task, with every number in full. The others have the table
    that a terminal shows, a table of the pairs that were asked for, and the notes: in LaTeX as
    comments.
    """
    if form == "csv":
        return _csv(rows_of(document))
    shown = labelled(document)
    tables, said = [summary_with_costs(shown)], notes(shown)
    if any(each.asked for each in shown.differences):
        tables.append(differences_table(shown, asked=True))
        said = [*said, asked_title(shown)]
    if form == "latex":
        lines = ["% needs \\usepackage{booktabs}", *(f"% {line}" for line in said)]
        return "\n\n".join(["\n".join(lines), *map(latex, tables)]) + "\n"
    return "\n\n".join([*map(markdown, tables), "\n".join(f"- {line}" for line in said)]) + "\n"


def markdown(table: Table) -> str:
    """Write a table in the pipes of Markdown."""
    head, *rows = _texts(table, {"\\": "\\\\", "|": r"\|"})
    marks = ["---" if column.words else "---:" for column in table.columns]
    return "\n".join(f"| {' | '.join(texts)} |" for texts in (head, marks, *rows))


def latex(table: Table) -> str:
    """Write a table as a `tabular` with the rules of booktabs; groups of rows are spaced."""
    head, *rows = (" & ".join(texts) + r" \\" for texts in _texts(table, _SPECIAL))
    kinds = "".join("l" if column.words else "r" for column in table.columns)
    lines = [rf"\begin{{tabular}}{{{kinds}}}", r"\toprule", head, r"\midrule"]
    grouped = not all(row.first for row in table.rows)
    for i, (row, line) in enumerate(zip(table.rows, rows, strict=True)):
        lines += [r"\addlinespace", line] if grouped and row.first and i else [line]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def _texts(table: Table, escapes: dict[str, str]) -> list[list[str]]:
    """Return the heads and the cells of a table, each in one line, with letters escaped."""
    heads = [
        "policy" if each.title == "variant" else f"{each.title} {each.below}".strip()
        for each in table.columns
    ]
    rows = [[row.head, *map(_cell, row.cells)] for row in table.rows]
    special = re.compile("|".join(map(re.escape, escapes)))
    return [
        [special.sub(lambda found: escapes[found[0]], text) for text in texts]
        for texts in (heads, *rows)
    ]


def _cell(cell: Cell) -> str:
    return " ".join([cell.text, *(note.text for note in cell.notes)])


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["variant"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


RULER = (
    *("cwe", "fwe", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3", "niah_multiquery"),
    *("niah_multivalue", "niah_single_1", "niah_single_2", "niah_single_3", "qa_1", "qa_2", "vt"),
)
_SUITE = "ruler/"


def check_board(tasks: Iterable[str]) -> None:
    """Refuse a run that has nothing of what the board shows.

    Raises:
        UsageError: none of its tasks is one of RULER's.
    """
    names = list(tasks)
    if not any(name.startswith(_SUITE) for name in names):
        raise UsageError(
            "-f board has RULER's scores in its columns, and this run has "
            f"{', '.join(names)} alone",
            hint="-f csv has every score",
        )


def board_csv(document: ResultsDocument) -> str:
    """Return a row for each variant; fields of tasks that a variant has no score of are empty.

    Raises:
        UsageError: none of the tasks is one of RULER's.
    """
    check_board(dict.fromkeys(result.task for result in document.results))
    ruler = [result for result in document.results if result.task.startswith(_SUITE)]
    return _csv(
        [
            _row(document.model.id, each.policy, [r for r in ruler if r.variant == each.name])
            for each in document.variants
        ]
    )


def _row(model: str, policy: str, results: Sequence[TaskResult]) -> dict[str, object]:
    scores = {result.task.removeprefix(_SUITE): result.value for result in results}
    known = [score for score in scores.values() if score is not None]
    lengths = sorted(
        {length for result in results for length in result.settings.get("lengths", ())}
    )
    return {
        "dataset": "ruler",
        "data_dir": "+".join(map(str, lengths)),
        "model": model,
        "method": policy,
        "compression_ratio": _removed(results),
        "query_aware": all(result.query_aware for result in results),
        "question": " / ".join(dict.fromkeys(result.question for result in results)),
        **{name: _rounded(scores.get(name)) for name in RULER},
        "score": _rounded(statistics.fmean(known) if known else None),
        "tasks": len(known),
    }


def _removed(results: Sequence[TaskResult]) -> float | None:
    """Return the share of their bytes that keys and values lack at a sample's end, over all tasks.

    Codecs make fewer bytes of what stays, too.
    """
    costs = [result.cost for result in results if result.cost is not None]
    shares = [1 - cost.kv_bytes / cost.full_bytes for cost in costs if cost.full_bytes]
    return round(statistics.fmean(shares), 4) if shares else None


def _rounded(score: float | None) -> float | None:
    return None if score is None else round(score, 2)
