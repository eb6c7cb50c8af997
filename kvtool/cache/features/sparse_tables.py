"""The tables of a sparse reader beside the slots of a layer, updated in place as tokens come.

In a padded batch the tables of all sequences are side by side in the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.maths.estimates import put_column
from kvtool.policies.numbers import HeadSizes, State
from kvtool.policies.parts import Read
from kvtool.policies.read.dry import step_bytes
from kvtool.policies.read.rows import PerRow, RowsRead, last_of
from kvtool.policies.read.view import Stored


class Length(NamedTuple):
    """How long a sequence is, and what reads it: as of `IndexedEntries`."""

    reader: Read
    budget: int
    stored: int
    tokens: int


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

    def lengths(self) -> list[Length]:
        """Return how long sequences are, of which one stands for all."""
        return [Length(self.reader, self.budget, self.stored, self.tokens)]

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

    def make_room(self, capacity: int) -> list[int]:
        """Let index and tables grow with the layer's slots, and return what they can hold then."""
        self.capacity = capacity
        room = self.tokens + capacity - self.stored
        if self.index is not None:
            self.index = with_columns(self.index, room)
        if self.tables is not None:
            for name, count in self.reader.columns(room).items():
                self.tables[name] = with_columns(self.tables[name], count)
        return [room]

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
        ahead: tokens of static steps that `stored` and `tokens` do not count yet.
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
    ahead: int = 0

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
        return self.stored.most + self.ahead

    def lengths(self) -> list[Length]:
        """Return how long each sequence is."""
        counts = zip(self.alone, self.stored.known, self.tokens.known, strict=True)
        return [
            Length(each.reader, each.budget, stored + self.ahead, tokens + self.ahead)
            for each, stored, tokens in counts
        ]

    def count_token(self) -> None:
        """Count a token that the layer has stored of each sequence, on the host alone."""
        self.ahead += 1

    def following(self, kv_heads: int) -> Tensor:
        """Return the slots of the next tokens, (rows, kv_heads)."""
        return self.stored.tensor[:, 0].expand(-1, kv_heads).contiguous()

    def settle(self) -> None:
        """Count on the device as well."""
        if self.ahead:
            self.stored, self.tokens = self.stored.plus(self.ahead), self.tokens.plus(self.ahead)
            self.ahead = 0

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
        self.settle()
        slot, at = self.stored.tensor.expand(-1, keys.shape[1], 1), self.tokens.tensor
        if self.capacity != keys.shape[2]:
            self.make_room(keys.shape[2])
        if self.index is not None:
            self.index.scatter_(2, at.expand_as(slot), slot)
        self.stored, self.tokens = self.stored.plus(1), self.tokens.plus(1)
        if self.tables is None:
            self.build(keys, values)
            return
        key, value = (_token(buffer, slot) for buffer in (keys, values))
        self.reader.append_rows(self.tables, key, value, self.tokens, self.sizes)

    def make_room(self, capacity: int) -> list[int]:
        """Let index and tables grow as the buffers have, and return what they can hold then."""
        counts = zip(self.tokens.known, self.stored.known, strict=True)
        rooms = [tokens + capacity - stored for tokens, stored in counts]
        if self.index is not None:
            self.index = with_columns(self.index, max(rooms))
        if self.tables is not None:
            for each, room in zip(self.alone, rooms, strict=True):
                for name, count in each.reader.columns(room).items():
                    self.tables[name] = with_columns(self.tables[name], count)
        self.capacity = capacity
        return rooms

    def mapped(self, change: Callable[[Tensor], Tensor], rows: slice) -> PaddedEntries:
        """The same for other batch entries, which `change` brings about."""
        self.settle()
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


class Clock:
    """How many tokens there are in a static step, for all layers that have as many.

    Shapes follow from the size of the buffers. The count is that of the cache, on its device, less
    what is constant.

    Attributes:
        most: tokens to choose from once all slots are taken, of each sequence.
        budget, sizes: of each sequence.
        dense: for each sequence, whether the steps may begin with one that reads all its tokens.
    """

    def __init__(self, lengths: list[Length], most: list[int], seen: int, device: torch.device):
        readers, tokens = [each.reader for each in lengths], [each.tokens for each in lengths]
        self.sizes = _numbers(readers, device)
        if "page" in self.sizes:  # a page that is not whole may be read as far as it could reach
            pages = self.sizes["page"].known
            most = [-(-own // page) * page for own, page in zip(most, pages, strict=True)]
        self.most, self.budget = most, PerRow.of([each.budget for each in lengths], device)
        self.dense = [each.tokens < each.budget for each in lengths]
        k = self.sizes["k"].most if "k" in self.sizes else 0
        self._floor = k if min(tokens) >= k else 0  # a number that caches of a kind have in common
        self._unseen = PerRow.of([seen - count for count in tokens], device).tensor
        self._now: PerRow | None = None

    def begin(self) -> None:
        """Let a step begin."""
        self._now = None

    def tokens(self, seen: Tensor) -> PerRow:
        """Count the tokens of each sequence, the running one included, of those that are seen."""
        if torch.compiler.is_compiling():
            return PerRow(self.most, seen - self._unseen, self._floor)
        if self._now is None:
            self._now = PerRow(self.most, seen - self._unseen, self._floor, made={})
        return self._now

    def stationary(self) -> list[Tensor]:
        """Return what a static step reads, where it is."""
        return [self._unseen, *(size.tensor for size in [self.budget, *self.sizes.values()])]


class FixedEntries:
    """Batch entries in steps that change nothing but contents of tensors.

    Attributes:
        of: whose reader, rows, index and tables these are.
        capacity: slots of the layer.
        clock: shared with all layers that have as many tokens.
    """

    def __init__(
        self, of: Entries, seen: int, capacity: int, device: torch.device, clocks: dict[Any, Any]
    ) -> None:
        self.of, self.capacity = of, capacity
        self.most, lengths = of.make_room(capacity), of.lengths()
        assert isinstance(of.reader, RowsRead), "a static step was not allowed"
        self.reader, self.rows = of.reader, of.rows
        self.index, self.tables = of.index, of.tables or {}
        kind = (device, seen, *self.most, *lengths)
        if kind not in clocks:
            clocks[kind] = Clock(lengths, self.most, seen, device)
        self.clock = clock = clocks[kind]
        self.sizes, self.budget, self.dense = clock.sizes, clock.budget, clock.dense
        self._pairs: float | None = None

    def pairs_read(self, keys: Tensor, values: Tensor, heads: int) -> float:
        """Count the pairs that a step has read of a row and KV head, empty slots included."""
        if self._pairs is None:
            layer = HeadSizes(keys.shape[1], heads, keys.shape[-1], values.shape[-1], itemsize=2)
            lengths = self.of.lengths()
            rows = zip(lengths, self.most, strict=True)
            read = sum(step_bytes(each.reader, layer, most) for each, most in rows)
            pair = layer.kv_heads * (layer.key_dim + layer.value_dim) * layer.itemsize
            self._pairs = read / (pair * len(lengths))
        return self._pairs

    def stationary(self) -> list[Tensor]:
        """Return what a static step reads or writes, where it is."""
        return [*self.of.tensors(), *self.clock.stationary()]

    def candidates(self, buffer: Tensor) -> Tensor:
        """The tokens to choose from, of each sequence as many as there may be."""
        return buffer if self.index is None else next(take_slots(self.index, buffer))

    @torch.no_grad()
    def append(self, keys: Tensor, values: Tensor, slot: Tensor, tokens: PerRow) -> None:
        """Take in the last of the tokens, which is in a slot: (rows, kv_heads, 1) int64."""
        if self.index is not None:
            put_column(self.index[:, :, None], slot, last_of(tokens))
        if self.tables:
            key, value = (_token(buffer, slot) for buffer in (keys, values))
            self.reader.append_rows(self.tables, key, value, tokens, self.sizes)


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
