"""Write the results of a run as CSV, as a table of LaTeX or as one of Markdown."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from kvtool.documents.results import ResultsDocument
from kvtool.report.labels import labelled
from kvtool.report.results import summary_with_costs
from kvtool.report.rows import rows_of
from kvtool.report.table import Cell, Column, Table
from kvtool.report.words import asked_title, differences_table, notes

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
