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

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.text import Text

from kvtool.documents.results import ResultsDocument, TaskResult
from kvtool.errors import UsageError
from kvtool.report.needles import needle_tasks
from kvtool.report.results import gates, needles, summary_with_costs
from kvtool.report.rows import rows_of
from kvtool.report.table import Cell, Column, Row, Table
from kvtool.report.terminal import FittingTables, rich_table
from kvtool.report.variants import labelled
from kvtool.report.words import (
    asked_in_words,
    asked_title,
    choices_in_words,
    claim_lines,
    differences_in_words,
    differences_table,
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
        return _csv(document)
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
    rows = [[_escaped_pipe(text) for text in row] for row in _texts(table)]
    marks = ["---" if column.words else "---:" for column in table.columns]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], marks, *rows[1:]))


def latex(table: Table) -> str:
    """Write a table as a `tabular` with the rules of booktabs; groups of rows are spaced."""
    head, *rows = [[_escaped(text) for text in row] for row in _texts(table)]
    kinds = "".join("l" if column.words else "r" for column in table.columns)
    lines = [rf"\begin{{tabular}}{{{kinds}}}", r"\toprule", _line(head), r"\midrule"]
    grouped = not all(row.first for row in table.rows)
    for i, (row, texts) in enumerate(zip(table.rows, rows, strict=True)):
        lines += [r"\addlinespace"] if grouped and row.first and i else []
        lines.append(_line(texts))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def _line(texts: Sequence[str]) -> str:
    return " & ".join(texts) + r" \\"


def _texts(table: Table) -> list[list[str]]:
    """Return the heads and the cells of a table, each in one line."""
    rows = [[row.head, *map(_cell, row.cells)] for row in table.rows]
    heads = ["policy" if column.title == "variant" else _title(column) for column in table.columns]
    return [heads, *rows]


def _title(column: Column) -> str:
    return " ".join(f"{column.title} {column.below}".split())


def _cell(cell: Cell) -> str:
    return " ".join([cell.text, *(note.text for note in cell.written_notes if note.text)])


def _escaped(text: str) -> str:
    return re.sub("|".join(map(re.escape, _SPECIAL)), lambda found: _SPECIAL[found[0]], text)


def _escaped_pipe(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", r"\|")


def _csv(document: ResultsDocument) -> str:
    rows = rows_of(document)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["variant"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


RULER = (
    "cwe",
    "fwe",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multiquery",
    "niah_multivalue",
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "qa_1",
    "qa_2",
    "vt",
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
    rows = []
    for variant in document.variants:
        results = [
            result
            for result in document.results
            if result.variant == variant.name and result.task.startswith(_SUITE)
        ]
        rows.append(_row(document.model.id, variant.policy, results))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


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
