"""The tables of a reader over the rows of a padded batch, side by side in the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.cache.storage.sparse_index import IndexedEntries, take_slots, with_columns
from kvtool.policies.numbers import State
from kvtool.policies.read.rows import PerRow, RowsRead


@dataclass
class PaddedEntries:
    """Batch entries of a layer that differ in length and are read together.

    Attributes:
        alone: what each row would be by itself, without its index and tables.
        rows: which of the layer's batch entries.
        budget, stored, tokens: as of `IndexedEntries`, of each row.
        sizes: those of each row's reader.
        index: (rows, kv_heads, capacity) int64, as there, 0 beyond a row's own; None: all.
        tables: each axis as long as that of the longest row; None while all rows are dense.
        capacity: slots that the tables have room for.
    """

    alone: list[IndexedEntries]
    rows: slice
    budget: PerRow
    stored: PerRow
    tokens: PerRow
    sizes: dict[str, PerRow]
    index: Tensor | None = None
    tables: State | None = None
    capacity: int = 0

    @classmethod
    def of(cls, alone: list[IndexedEntries], device: torch.device) -> PaddedEntries:
        """Put rows side by side."""
        readers = [each.reader for each in alone]
        names = [field.name for field in fields(readers[0])]  # type: ignore[arg-type]
        sizes = {name: [getattr(reader, name) for reader in readers] for name in names}
        numbers = {
            name: PerRow.of(own, device)
            for name, own in sizes.items()
            if all(type(number) is int for number in own)
        }
        parts = [each.index for each in alone if each.index is not None]
        return cls(
            [replace(each, index=None) for each in alone],
            slice(0, len(alone)),
            PerRow.of([each.budget for each in alone], device),
            PerRow.of([each.stored for each in alone], device),
            PerRow.of([each.tokens for each in alone], device),
            numbers,
            index=_side_by_side(parts) if parts else None,
        )

    @property
    def reader(self) -> RowsRead:
        """One of the readers, which differ in their sizes alone."""
        reader = self.alone[0].reader
        assert isinstance(reader, RowsRead), "this reader reads rows one by one"
        return reader

    @property
    def dense(self) -> list[bool]:
        """Whether the next step reads all tokens of a row."""
        pairs = zip(self.tokens.known, self.budget.known, strict=True)
        return [tokens <= budget for tokens, budget in pairs]

    @property
    def longest(self) -> int:
        """Slots that the longest row has stored tokens in."""
        return self.stored.most

    def tensors(self) -> list[Tensor]:
        """What takes memory."""
        index = [] if self.index is None else [self.index]
        return [*index, *(self.tables or {}).values()]

    @torch.no_grad()
    def build(self, keys: Tensor, values: Tensor) -> None:
        """Make the tables of all rows, if one of them does not fit into its budget."""
        if all(self.dense):
            return
        made: list[State] = []
        counts = zip(self.alone, self.tokens.known, strict=True)
        for row, (each, tokens) in enumerate(counts):
            own = slice(row, row + 1)
            index = None if self.index is None else self.index[own]
            entry = replace(each, budget=-1, tokens=tokens, index=index)  # not even of no tokens
            entry.build(keys[own], values[own])
            made.append(entry.tables or {})
        self.tables = {
            name: _side_by_side([tables.pop(name) for tables in made]) for name in list(made[0])
        }
        self.capacity = 0

    def candidates(self, buffer: Tensor) -> Tensor:
        """The tokens to choose from, of each row as many as the longest has."""
        if self.index is None:
            return buffer[:, :, : self.tokens.most]
        return take_slots(buffer, self.index[..., : self.tokens.most])

    @torch.no_grad()
    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take in the token of each row that stands behind those it has stored."""
        slot, at = self.stored.tensor.expand(-1, keys.shape[1], 1), self.tokens.tensor
        if self.capacity != keys.shape[2]:
            self._make_room(keys.shape[2])
        if self.index is not None:
            self.index.scatter_(2, at.expand_as(slot), slot)
        self.stored, self.tokens = self.stored.plus(1), self.tokens.plus(1)
        if self.tables is None:
            self.build(keys, values)
            return
        key, value = (_token(buffer, slot) for buffer in (keys, values))
        self.reader.append_rows(self.tables, key, value, at, self.sizes)

    def _make_room(self, capacity: int) -> None:
        """Let index and tables grow as the buffers have."""
        counts = zip(self.tokens.known, self.stored.known, strict=True)
        rooms = [tokens + capacity - stored for tokens, stored in counts]
        if self.index is not None:
            self.index = with_columns(self.index, max(rooms))
        if self.tables is not None:
            for each, room in zip(self.alone, rooms, strict=True):
                for name, count in each.reader.columns(room).items():
                    self.tables[name] = with_columns(self.tables[name], count)
        self.capacity = capacity

    def mapped(self, change: Callable[[Tensor], Tensor], rows: slice) -> PaddedEntries:
        """The same for other batch entries, which `change` brings about."""
        order = change(torch.arange(len(self.alone))).tolist()

        def moved(numbers: PerRow) -> PerRow:
            return PerRow([numbers.known[old] for old in order], change(numbers.tensor))

        return PaddedEntries(
            [self.alone[old] for old in order],
            rows,
            moved(self.budget),
            moved(self.stored),
            moved(self.tokens),
            {name: moved(size) for name, size in self.sizes.items()},
            None if self.index is None else change(self.index),
            self.tables and {name: change(table) for name, table in self.tables.items()},
        )


def _token(buffer: Tensor, slot: Tensor) -> Tensor:
    """The content of one slot of each row and head, (rows, kv_heads, dim)."""
    return buffer.gather(2, slot[..., None].expand(*slot.shape, buffer.shape[-1]))[:, :, 0]


def _side_by_side(rows: Sequence[Tensor]) -> Tensor:
    """Put tensors of one row each into one, with 0 where another is longer."""
    shape = [max(sizes) for sizes in zip(*(row.shape for row in rows), strict=True)]
    with torch.inference_mode(False):
        joined = rows[0].new_zeros(len(rows), *shape[1:])
    for place, row in enumerate(rows):
        part = joined[place]
        for axis, size in enumerate(row.shape[1:]):
            part = part.narrow(axis, 0, size)
        part.copy_(row[0])
    return joined


def widened(slots: Tensor, width: int) -> Tensor:
    """Lists of slots with -1 behind them, up to a width."""
    return functional.pad(slots, (0, width - slots.shape[-1]), value=-1)
