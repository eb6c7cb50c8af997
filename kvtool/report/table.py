"""Hold a table, whoever shows it.

`terminal` lays it out with rich, `templates` writes it on the page and in a notebook, and
`results_text` in LaTeX and Markdown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Look = Literal["", "better", "worse", "failed", "dim"]
"""How a cell, a note or a row is highlighted: a class of the style sheet, a style of a terminal."""


@dataclass(frozen=True)
class Note:
    """A word in small print after a number."""

    text: str
    look: Look = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        notes: words in small print after its text.
        look: how it is highlighted.
        share: where its number lies on the scale of colours, from 0 to 1; None: not coloured.
    """

    text: str
    notes: tuple[Note, ...] = ()
    look: Look = ""
    share: float | None = None


@dataclass(frozen=True)
class Column:
    """The head of a column.

    Attributes:
        title: what its cells are.
        below: a second line, such as the unit.
        short: both lines as a terminal has them, where they differ.
        words: whether it holds words, which are aligned left, and not numbers.
        folds: whether a terminal breaks what is too long, and does not cut it off.
        group: columns of one group stay in one table where a terminal needs several.
    """

    title: str
    below: str = ""
    short: str = ""
    words: bool = False
    folds: bool = False
    group: str = ""


@dataclass(frozen=True)
class Row:
    """A row of a table: its head, and a cell for each column after the first.

    Attributes:
        first: whether it begins a group of rows, with a line above it.
    """

    head: str
    cells: Sequence[Cell]
    first: bool = False
    look: Look = ""


@dataclass(frozen=True)
class Table:
    """A table; the first column holds the heads of the rows.

    Without titles of columns it is a list, such as of sentences by topic.

    Attributes:
        caption: what is written above it.
        dense: whether its cells touch, as those of a heat map.
    """

    columns: Sequence[Column]
    rows: Sequence[Row]
    caption: str = ""
    dense: bool = False

    def pick(self, places: Sequence[int]) -> Table:
        """Return the table with the columns at these places, in their order; 0 is the first."""
        rows = []
        for each in self.rows:
            cells = [Cell(each.head), *each.cells]
            first, *others = (cells[place] for place in places)
            rows.append(replace(each, head=first.text, cells=others))
        return replace(self, columns=[self.columns[place] for place in places], rows=rows)

    def beside(self, other: Table) -> Table:
        """Return the table with the columns of another one of the same rows after its own."""
        pairs = zip(self.rows, other.rows, strict=True)
        rows = [replace(mine, cells=[*mine.cells, *more.cells]) for mine, more in pairs]
        return replace(self, columns=[*self.columns, *other.columns[1:]], rows=rows)


def row(head: str, *cells: str | Cell, look: Look = "") -> Row:
    """Return a row of cells, of which plain ones are given as their text."""
    made = [Cell(each) if isinstance(each, str) else each for each in cells]
    return Row(head, made, look=look)
