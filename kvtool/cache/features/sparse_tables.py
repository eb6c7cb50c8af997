"""The tables of a sparse reader beside the slots of a layer, updated in place as tokens come.

In a padded batch the tables of all sequences are side by side in the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.policies.numbers import State
from kvtool.policies.parts import Read
from kvtool.policies.read.rows import PerRow, RowsRead
from kvtool.policies.read.view import Stored


@dataclass
class IndexedEntries:
    """Batch entries of a layer that are read alike. Token j of each is in slot j.

    Attributes:
        rows: which of the layer's batch entries.
        reader: with all its sizes.
        budget: pairs of key and value; where all tokens fit, all are read.
        prompt: how many of `tokens` there were when the prompt ended.
        stored: tokens that each sequence holds.
        tokens: of these, how many there are to choose from.
        index: (rows, kv_heads, capacity) int64, the slots of those tokens; None: all that are
            stored.
        tables: the reader's; None while all tokens fit into the budget.
        basis: (kv_heads, head_dim, head_dim) of the layer, from the reader's file.
        capacity: slots that index and tables have grown with.
    """

    rows: slice
    reader: Read
    budget: int
    prompt: int
    stored: int
    tokens: int
    index: Tensor | None = None
    tables: State | None = None
    basis: Tensor | None = None
    capacity: int = 0

    @property
    def dense(self) -> bool:
        """Whether the next step reads all tokens."""
        return self.tokens <= self.budget

    @property
    def longest(self) -> int:
        """Slots that have stored tokens in the longest sequence: all are as long."""
        return self.stored

    def tensors(self) -> list[Tensor]:
        """What takes memory."""
        return _held(self.index, self.tables)

    @torch.no_grad()
    def build(self, keys: Tensor, values: Tensor) -> None:
        """Make the tables of the layer's buffers, if not all tokens fit into the budget."""
        if self.dense:
            return
        with torch.inference_mode(False):
            stored = Stored(self.candidates(keys), self.candidates(values), self.prompt, self.basis)
            self.tables = self.reader.start(stored)

    def candidates(self, buffer: Tensor) -> Tensor:
        """The tokens to choose from: (rows, kv_heads, tokens, dim)."""
        if self.index is None:
            return buffer[:, :, : self.tokens]
        return next(take_slots(self.index[..., : self.tokens], buffer))

    @torch.no_grad()
    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take in the token behind the stored ones, of the layer's buffers."""
        slot, at = self.stored, self.tokens
        if self.capacity != keys.shape[2]:
            self.make_room(keys.shape[2])
        self.count_token()
        if self.index is not None:
            self.index[..., at] = slot
        if self.tables is None:
            self.build(keys, values)
            self.make_room(keys.shape[2])
        else:
            self.reader.append(self.tables, keys[:, :, slot], values[:, :, slot], at)

    def make_room(self, capacity: int) -> int:
        """Let index and tables grow with the layer's slots, and return what they can hold then."""
        self.capacity = capacity
        room = self.tokens + capacity - self.stored
        if self.index is not None:
            self.index = with_columns(self.index, room)
        if self.tables is not None:
            for name, count in self.reader.columns(room).items():
                self.tables[name] = with_columns(self.tables[name], count)
        return room

    def count_token(self) -> None:
        """Count a token that the layer has stored."""
        self.stored, self.tokens = self.stored + 1, self.tokens + 1

    def of_entry(self, row: int, rows: slice) -> IndexedEntries:
        """A copy for one of the sequences, which goes its own way as `rows` of another batch."""
        return self.mapped(lambda t: t[row : row + 1].clone(), rows)

    def mapped(self, change: Callable[[Tensor], Tensor], rows: slice) -> IndexedEntries:
        """The same for other batch entries, which `change` brings about."""
        tables = self.tables and {name: change(table) for name, table in self.tables.items()}
        index = None if self.index is None else change(self.index)
        return replace(self, rows=rows, tables=tables, index=index)


class FixedEntries:
    """`IndexedEntries` in steps that change nothing but contents of tensors.

    How many tokens there are is known on the device alone; shapes follow from the buffers.

    Attributes:
        of: whose reader, rows, index and tables these are.
        capacity: slots of the layer.
        most: tokens to choose from once all slots are taken.
        slot: (1, 1, 1) int64, where the running step's token is stored.
        at: (1, 1, 1) int64, its number among the tokens to choose from.
        tokens: how many these are, itself included.
    """

    dense = (False,)

    def __init__(self, of: IndexedEntries, device: torch.device, capacity: int) -> None:
        self.of, self.capacity = of, capacity
        self.most = room = of.make_room(capacity)
        assert isinstance(of.reader, RowsRead), "a static step was not allowed"
        self.reader, self.rows = of.reader, of.rows
        self.index, self.tables = of.index, of.tables or {}
        self.sizes = _numbers([of.reader], device)
        if "page" in self.sizes:  # a page that is not whole may be read as far as it could reach
            room = -(-room // self.sizes["page"].most) * self.sizes["page"].most
        self.tokens = PerRow.of([room], device)
        with torch.inference_mode(False):
            self.slot, self.at = torch.zeros_like(self.tokens.tensor), self.tokens.tensor - 1

    def begin(self) -> None:
        """Copy the host's numbers to the device."""
        self.slot.fill_(self.of.stored)
        self.at.fill_(self.of.tokens)
        self.tokens.tensor.fill_(self.of.tokens + 1)

    def stationary(self) -> list[Tensor]:
        """Return what a static step reads or writes, where it is."""
        sizes = [size.tensor for size in self.sizes.values()]
        return [*self.of.tensors(), self.slot, self.at, self.tokens.tensor, *sizes]

    def candidates(self, buffer: Tensor) -> Tensor:
        """The tokens to choose from, of each sequence as many as there may be."""
        return buffer if self.index is None else next(take_slots(self.index, buffer))

    @torch.no_grad()
    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take in the running step's token."""
        slot = self.slot.expand(*keys.shape[:2], 1)
        if self.index is not None:
            self.index.scatter_(2, self.at.expand_as(slot), slot)
        key, value = (_token(buffer, slot) for buffer in (keys, values))
        self.reader.append_rows(self.tables, key, value, self.at, self.sizes)


def _numbers(readers: list[Read], device: torch.device) -> dict[str, PerRow]:
    """Find the fields of readers that are whole numbers."""
    names = [field.name for field in fields(readers[0])]  # type: ignore[arg-type]
    sizes = {name: [getattr(reader, name) for reader in readers] for name in names}
    return {
        name: PerRow.of(own, device)
        for name, own in sizes.items()
        if all(type(number) is int for number in own)
    }


def take_slots(slots: Tensor, *buffers: Tensor) -> Iterator[Tensor]:
    """Copy tokens out of contiguous buffers of as many slots each, every token as a whole.

    Args:
        slots: (batch, kv_heads, count) int64, or (batch, kv_heads, group, count).
        buffers: (batch, kv_heads, capacity, dim).

    Yields:
        (batch, kv_heads, count, dim), or (batch, kv_heads * group, count, dim), of each buffer.
    """
    batch, heads, capacity, _ = buffers[0].shape
    first = torch.arange(0, batch * heads * capacity, capacity, device=slots.device)
    places = (slots + first.view(batch, heads, *[1] * (slots.dim() - 2))).flatten()
    shape = batch, slots.shape[1:-1].numel(), slots.shape[-1]
    for buffer in buffers:
        taken = buffer.view(-1, buffer.shape[-1]).index_select(0, places)
        yield taken.view(*shape, buffer.shape[-1])


def with_columns(table: Tensor, count: int) -> Tensor:
    """The table itself, or a longer copy where its last axis is shorter than `count`."""
    columns = table.shape[-1]
    if count <= columns:
        return table
    with torch.inference_mode(False):
        longer = table.new_zeros(*table.shape[:-1], count)
    longer[..., :columns] = table
    return longer


@dataclass
class PaddedEntries:
    """Batch entries of a layer that differ in length and are read together.

    Attributes:
        alone: what each sequence would be by itself, without its index and tables.
        rows: which of the layer's batch entries.
        budget, stored, tokens: as of `IndexedEntries`, of each sequence.
        sizes: those of each sequence's reader.
        index: (rows, kv_heads, capacity) int64, as there, 0 beyond a sequence's own; None: all.
        tables: each axis as long as that of the longest sequence; None while all sequences are
            dense.
        capacity: slots that the tables can hold.
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
        """Put sequences side by side."""
        parts = [each.index for each in alone if each.index is not None]
        return cls(
            [replace(each, index=None) for each in alone],
            slice(0, len(alone)),
            PerRow.of([each.budget for each in alone], device),
            PerRow.of([each.stored for each in alone], device),
            PerRow.of([each.tokens for each in alone], device),
            _numbers([each.reader for each in alone], device),
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
        """Whether the next step reads all tokens of a sequence."""
        pairs = zip(self.tokens.known, self.budget.known, strict=True)
        return [tokens <= budget for tokens, budget in pairs]

    @property
    def longest(self) -> int:
        """Slots that the longest sequence has stored tokens in."""
        return self.stored.most

    def tensors(self) -> list[Tensor]:
        """What takes memory."""
        return _held(self.index, self.tables)

    @torch.no_grad()
    def build(self, keys: Tensor, values: Tensor) -> None:
        """Make the tables of all sequences, if one of them does not fit into its budget."""
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
        """The tokens to choose from, of each sequence as many as the longest has."""
        if self.index is None:
            return buffer[:, :, : self.tokens.most]
        return next(take_slots(self.index[..., : self.tokens.most], buffer))

    @torch.no_grad()
    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take in the token of each sequence behind those it has stored."""
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


Entries = IndexedEntries | PaddedEntries
"""Batch entries of a layer and their tables."""


def _held(index: Tensor | None, tables: State | None) -> list[Tensor]:
    return [*([] if index is None else [index]), *(tables or {}).values()]


def _token(buffer: Tensor, slot: Tensor) -> Tensor:
    """The content of one slot of each sequence and head, (rows, kv_heads, dim)."""
    return buffer.gather(2, slot[..., None].expand(*slot.shape, buffer.shape[-1]))[:, :, 0]


def _side_by_side(rows: Sequence[Tensor]) -> Tensor:
    """Put tensors of one sequence each into one, with 0 where another is longer."""
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
