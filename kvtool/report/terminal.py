"""Render a table on a terminal, with rich; it reads without colour too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich import table as rich
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions
from rich.text import Text

from kvtool.report.colour_scale import colour_at, ink_on
from kvtool.report.table import Cell, Column, Table
from kvtool.report.variants import wrap

_STYLES = {"better": "green", "worse": "red", "failed": "bold red", "dim": "dim", "": ""}


def rich_table(table: Table, *, edge: bool = True) -> rich.Table:
    """Return a table as rich draws it.

    Args:
        edge: whether empty lines are above and below it.
    """
    made = _frame(table, edge)
    for place, column in enumerate(table.columns):
        made.add_column(
            Text(column.short or _title(column, dense=table.dense and place > 0)),
            justify="left" if column.words else "right",
            overflow="fold" if column.folds else "ellipsis",
            no_wrap=not (column.words or column.folds),
        )
    grouped = not all(row.first for row in table.rows)
    ends = [grouped and row.first for row in table.rows[1:]] + [False]
    for row, end in zip(table.rows, ends, strict=True):
        head = Text(row.head, no_wrap=not made.show_header or None)
        made.add_row(head, *map(_cell, row.cells), style=_STYLES[row.look], end_section=end)
    return made


@dataclass(frozen=True)
class FittingTables:
    """A table as wide as the terminal allows: one table where it fits, else one per group."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[rich.Table]:
        wrapped = self._wrapped(max(16, options.max_width // 4))

        def laid_out(places: Sequence[int]) -> rich.Table:
            return rich_table(wrapped.pick([0, *places]))

        def fits(places: Sequence[int]) -> bool:
            unlimited = options.update(width=10_000)
            widths = console.measure(laid_out(places), options=unlimited)
            return widths.maximum <= options.max_width

        pages: list[list[int]] = []
        for group in self._groups():
            whole = [*pages[-1], *group] if pages else group
            if fits(whole):
                pages[-1:] = [whole]
                continue
            pages.append([])
            for place in group:
                if pages[-1] and not fits([*pages[-1], place]):
                    pages.append([])
                pages[-1].append(place)
        yield from map(laid_out, pages)

    def _wrapped(self, width: int) -> Table:
        """Return the table with the names of its rows broken where their parts begin."""
        rows = [replace(row, head=wrap(row.head, width)) for row in self.table.rows]
        return replace(self.table, rows=rows)

    def _groups(self) -> list[list[int]]:
        groups: dict[str, list[int]] = {}
        for place, column in enumerate(self.table.columns[1:], start=1):
            groups.setdefault(column.group, []).append(place)
        return list(groups.values())


def _frame(table: Table, edge: bool) -> rich.Table:
    """Return an empty table without columns."""
    if not any(column.title for column in table.columns):
        return rich.Table.grid(padding=(0, 1))
    if table.dense:
        title = Text(table.caption)
        width = max(map(len, title.plain.split("\n")))
        return rich.Table(box=None, padding=0, pad_edge=False, title=title, min_width=width)
    caption = Text(table.caption, "table.title") if table.caption else None
    return rich.Table(
        title=caption, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, show_edge=edge
    )


def _title(column: Column, *, dense: bool) -> str:
    title = f" {column.title}" if dense else column.title
    return f"{title}\n{column.below}" if column.below else title


def _cell(cell: Cell) -> Text:
    """Return a cell with its notes; a standard error is set close to its number."""
    if cell.share is not None:
        colour = ",".join(map(str, colour_at(cell.share)))
        return Text(f" {cell.text}", f"{ink_on(cell.share)} on rgb({colour})")
    text = Text(cell.text, _STYLES[cell.look])
    for note in cell.notes:
        text.append("" if note.text.startswith("±") else " ").append(note.text, _STYLES[note.look])
    return text
