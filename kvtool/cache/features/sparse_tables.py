"""The tables of a sparse reader beside the slots of a layer, updated in place as tokens come.

In a padded batch the tables of all sequences are side by side in the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.maths.estimates import put_column
from kvtool.policies.numbers import HeadSizes, State
from kvtool.policies.parts import Read
from kvtool.policies.read.dry import step_bytes
from kvtool.policies.read.rows import PerRow, RowsRead, last_of
from kvtool.policies.read.view import Stored

Sizes = dict[str, PerRow]
"""Those of the reader of each sequence, by the names of its fields."""


@dataclass
class Entries:
    """Batch entries of a layer that are read together. Token j of each is in slot j.

    Where they are `alike`, the numbers of one stand for all. Others differ in length.

    Attributes:
        rows: which of the layer's batch entries.
        readers: of each sequence, with all its sizes.
        prompts: how many of its `tokens` there were when the prompt ended.
        budget: pairs of key and value; where all tokens fit, all are read.
        stored: tokens that each sequence holds.
        tokens: of these, how many there are to choose from.
        sizes: those of each sequence's reader; none where sequences are alike.
        index: (rows, kv_heads, capacity) int64, the slots of those tokens, 0 beyond a sequence's
            own; None: all that are stored.
        tables: the readers', each axis as long as that of the longest sequence; None while all
            tokens fit into the budget.
        basis: (kv_heads, head_dim, head_dim) of the layer, from the reader's file.
        capacity: slots that index and tables have grown with.
        ahead: tokens of static steps that `stored` and `tokens` do not count yet.
    """

    rows: slice
    readers: list[Read]
    prompts: list[int]
    budget: PerRow
    stored: PerRow
    tokens: PerRow
    sizes: Sizes = field(default_factory=dict)
    index: Tensor | None = None
    tables: State | None = None
    basis: Tensor | None = None
    capacity: int = 0
    ahead: int = 0

    @classmethod
    def side_by_side(cls, alone: list[Entries], device: torch.device) -> Entries:
        """Put sequences that differ in length side by side, one of each, before tables are made."""
        readers = [each.readers[0] for each in alone]
        parts = [each.index for each in alone if each.index is not None]
        budget, stored, tokens = (
            PerRow.of([getattr(each, name).most for each in alone], device)
            for name in ("budget", "stored", "tokens")
        )
        return cls(
            slice(0, len(alone)),
            readers,
            [prompt for each in alone for prompt in each.prompts],
            budget,
            stored,
            tokens,
            _numbers(readers, device),
            index=_side_by_side(parts) if parts else None,
            basis=alone[0].basis,
        )

    @property
    def alike(self) -> bool:
        """Whether the numbers of one sequence stand for all."""
        return self.tokens.alike

    @property
    def dense(self) -> list[bool]:
        """Whether the next step reads all tokens of a sequence."""
        pairs = zip(self.tokens.known, self.budget.known, strict=True)
        return [tokens <= budget for tokens, budget in pairs]

    @property
    def longest(self) -> int:
        """Slots that the longest sequence has stored tokens in."""
        return self.stored.most + self.ahead

    @property
    def sparse(self) -> bool:
        """Whether the next step chooses for a sequence, by tables that are there."""
        pairs = zip(self.tokens.known, self.budget.known, strict=True)
        return self.tables is not None and any(n + self.ahead >= most for n, most in pairs)

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
        return [*([] if self.index is None else [self.index]), *(self.tables or {}).values()]

    @torch.no_grad()
    def build(self, keys: Tensor, values: Tensor) -> None:
        """Make the tables of all sequences, if one of them does not fit into its budget."""
        if all(self.dense):
            return
        made: list[State] = []
        counts = zip(self.readers, self.prompts, self.tokens.known, strict=True)
        for row, (reader, prompt, tokens) in enumerate(counts):
            own = slice(None) if self.alike else slice(row, row + 1)
            index = None if self.index is None else self.index[own]
            key, value = (_first(buffer[own], index, tokens) for buffer in (keys, values))
            with torch.inference_mode(False):
                made.append(reader.start(Stored(key, value, prompt, self.basis)))
        self.tables = made[0]
        if not self.alike:
            names = list(made[0])
            self.tables = {n: _side_by_side([tables.pop(n) for tables in made]) for n in names}
        self.capacity = 0

    def candidates(self, buffer: Tensor) -> Tensor:
        """The tokens to choose from, of each sequence as many as the longest has."""
        return _first(buffer, self.index, self.tokens.most)

    @property
    def rows_reader(self) -> RowsRead:
        """One of the readers, which differ in their sizes alone and read all sequences at once."""
        reader = self.readers[0]
        assert isinstance(reader, RowsRead), "this reader reads rows one by one"
        return reader

    @torch.no_grad()
    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take in the token of each sequence behind those it has stored, of the layer's buffers."""
        if self.ahead:
            self.settle()
        stored, at = self.stored, self.tokens
        if self.capacity != keys.shape[2]:
            self.make_room(keys.shape[2])
        self.stored, self.tokens = stored.plus(1), at.plus(1)
        slot, place = stored.tensor, at.tensor
        if isinstance(slot, int):  # of all
            if self.index is not None:
                self.index[..., place] = slot
            if self.tables is not None:
                self.readers[0].append(self.tables, keys[:, :, slot], values[:, :, slot], place)
        else:
            slots = slot.expand(-1, keys.shape[1], 1)
            self.append_rows(keys, values, slots, self.tokens, self.sizes)
        if self.tables is None:
            self.build(keys, values)

    @torch.no_grad()
    def append_rows(
        self, keys: Tensor, values: Tensor, slot: Tensor, tokens: PerRow, sizes: Sizes
    ) -> None:
        """Take in the last of the tokens, which is in a slot: (rows, kv_heads, 1) int64."""
        if self.index is not None:
            put_column(self.index[:, :, None], slot, last_of(tokens))
        if self.tables:
            place = slot[..., None]
            key, value = (
                buffer.gather(2, place.expand(*slot.shape, buffer.shape[-1]))[:, :, 0]
                for buffer in (keys, values)
            )
            self.rows_reader.append_rows(self.tables, key, value, tokens, sizes)

    def make_room(self, capacity: int) -> list[int]:
        """Let index and tables grow with the layer's slots, and return what they can hold then."""
        counts = zip(self.tokens.known, self.stored.known, strict=True)
        rooms = [tokens + capacity - stored for tokens, stored in counts]
        if self.index is not None:
            self.index = with_columns(self.index, max(rooms))
        if self.tables is not None:
            for reader, room in zip(self.readers, rooms, strict=True):
                for name, count in reader.columns(room).items():
                    self.tables[name] = with_columns(self.tables[name], count)
        self.capacity = capacity
        return rooms

    def mapped(self, change: Callable[[Tensor], Tensor], rows: slice) -> Entries:
        """The same for other batch entries, which `change` brings about."""
        self.settle()
        own: dict[str, Any] = {}
        if not self.alike:
            order = change(torch.arange(len(self.readers))).tolist()

            def moved(numbers: PerRow) -> PerRow:
                return PerRow([numbers.known[old] for old in order], change(numbers.tensor))

            for name in ("readers", "prompts"):
                own[name] = [getattr(self, name)[old] for old in order]
            for name in ("budget", "stored", "tokens"):
                own[name] = moved(getattr(self, name))
            own["sizes"] = {name: moved(size) for name, size in self.sizes.items()}
        tables = self.tables and {name: change(table) for name, table in self.tables.items()}
        index = None if self.index is None else change(self.index)
        return replace(self, rows=rows, tables=tables, index=index, **own)


def _numbers(readers: list[Read], device: torch.device) -> Sizes:
    """Find the fields of readers that are whole numbers."""
    names = [each.name for each in fields(readers[0])]  # type: ignore[arg-type]
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


class Clock:
    """How many tokens there are in a static step, for all layers that have as many.

    Shapes follow from the size of the buffers. The count is that of the cache, on its device, less
    what is constant.

    Attributes:
        most: tokens to choose from once all slots are taken, of each sequence.
        budget, sizes: of each sequence.
        dense: for each sequence, whether the steps may begin with one that reads all its tokens.
    """

    def __init__(self, of: Entries, most: list[int], seen: int, device: torch.device):
        self.sizes = _numbers(of.readers, device)
        if "page" in self.sizes:  # a page that is not whole may be read as far as it could reach
            pages = self.sizes["page"].known
            most = [-(-own // page) * page for own, page in zip(most, pages, strict=True)]
        tokens, budget = of.tokens.known, of.budget.known
        self.most, self.budget = most, PerRow.of(budget, device)
        self.dense = [own < pairs for own, pairs in zip(tokens, budget, strict=True)]
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
        of: these entries.
        capacity: slots of the layer.
        clock: shared with all layers that have as many tokens.
    """

    def __init__(
        self, of: Entries, seen: int, capacity: int, device: torch.device, clocks: dict[Any, Any]
    ) -> None:
        self.of, self.capacity = of, capacity
        of.settle()
        self._most = most = of.make_room(capacity)
        kind = (device, seen, *most, *of.readers, *of.budget.known, *of.tokens.known)
        if kind not in clocks:
            clocks[kind] = Clock(of, most, seen, device)
        self.clock: Clock = clocks[kind]
        self._pairs: float | None = None

    def pairs_read(self, keys: Tensor, values: Tensor, heads: int) -> float:
        """Count the pairs that a step has read of a row and KV head, empty slots included."""
        if self._pairs is None:
            layer = HeadSizes(keys.shape[1], heads, keys.shape[-1], values.shape[-1], itemsize=2)
            readers = self.of.readers
            rows = zip(readers, self._most, strict=True)
            read = sum(step_bytes(reader, layer, most) for reader, most in rows)
            pair = layer.kv_heads * (layer.key_dim + layer.value_dim) * layer.itemsize
            self._pairs = read / (pair * len(readers))
        return self._pairs

    def stationary(self) -> list[Tensor]:
        """Return what a static step reads or writes, where it is."""
        return [*self.of.tensors(), *self.clock.stationary()]


def _first(buffer: Tensor, index: Tensor | None, tokens: int) -> Tensor:
    """The first tokens to choose from: (rows, kv_heads, tokens, dim)."""
    if index is None:
        return buffer[:, :, :tokens]
    return next(take_slots(index[..., :tokens], buffer))


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
