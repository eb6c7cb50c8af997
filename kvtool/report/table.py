"""Hold a table, whoever shows it: a terminal, the page or a notebook.

`kvtool.report.terminal` lays it out with rich, `table.html` writes it on the page, and
`kvtool.report.view` writes it in a notebook.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Look = Literal["", "better", "worse", "failed", "dim"]
"""How a cell, a note or a row is highlighted: a class of the style sheet, a style of a terminal."""


@dataclass(frozen=True)
class Note:
    """A word in small print after a number.

    Attributes:
        text: the word; empty keeps the place on a terminal only.
        look: how it is highlighted.
        kind: what it says; a terminal sets an error close to its number, and lines up the other
            kinds of a column that is `aligned`.
        width: the least characters that it takes on a terminal.
    """

    text: str
    look: Look = ""
    kind: Literal["", "error", "difference", "interval", "failed", "mark"] = ""
    width: int = 0


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: what it says.
        notes: words in small print after it.
        look: how it is highlighted.
        share: where its number lies on the scale of colours, from 0 to 1; None: not coloured.
    """

    text: str
    notes: tuple[Note, ...] = ()
    look: Look = ""
    share: float | None = None

    @property
    def written_notes(self) -> tuple[Note, ...]:
        """The notes without those that keep a place only."""
        return tuple(note for note in self.notes if note.text or not note.width)


@dataclass(frozen=True)
class Column:
    """The head of a column.

    Attributes:
        title: what its cells are.
        below: a second line, such as the unit.
        short: both lines as a terminal has them, where they differ.
        words: whether it holds words, which are aligned left, and not numbers, which are aligned
            right.
        folds: whether a terminal breaks what is too long, and does not cut it off.
        aligned: whether a terminal lines up the notes of its cells.
        group: columns of one group stay in one table where a terminal needs several.
    """

    title: str
    below: str = ""
    short: str = ""
    words: bool = False
    folds: bool = False
    aligned: bool = False
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
        caption: what a terminal and a notebook write above it.
        dense: whether its cells touch, as those of a heat map.
    """

    columns: Sequence[Column]
    rows: Sequence[Row]
    caption: str = ""
    dense: bool = False

    def pick(self, places: Sequence[int]) -> Table:
        """Return the table with the columns at these places, in their order; 0 is the first."""
        rows = []
        for row in self.rows:
            cells = [Cell(row.head), *row.cells]
            first, *others = (cells[place] for place in places)
            rows.append(replace(row, head=first.text, cells=others))
        return replace(self, columns=[self.columns[place] for place in places], rows=rows)
