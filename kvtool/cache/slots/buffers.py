"""Slots: fixed buffers of keys and values, and how tokens enter and leave them.

A slot holds the key and value of one token and its true position. Slot order is free: in steady
state nothing moves, the next token is written over the one evicted by the step before. An empty
slot has position -1. `Slots` has their contents as they are handed on, and `Ragged` is how a layer
sees heads that keep different counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvtool.cache.slots.counts import Addresses
from kvtool.cache.slots.sizing import Sizing, SlotMemory, State
from kvtool.cache.slots.slot_form import Form, Stored, take_stored
from kvtool.maths.selection import take


class Slots(NamedTuple):
    """What slots hold, keys and values as they are stored; mostly copies in ascending position."""

    stored: Stored
    positions: Tensor
    state: dict[str, Tensor]


class Ragged(Protocol):
    """Heads of unequal counts, as a layer sees them: `kvtool.cache.slots.ragged`.

    Attributes:
        buckets: slot layers, each of the heads that hold nearly the same count.
    """

    buckets: list[Any]

    def stored_positions(self) -> Tensor: ...

    def sorted_slots(self) -> Slots: ...

    def taken(self, chosen: Tensor, positions: Tensor, state: State) -> Slots: ...

    def split_again(self, layer: Any) -> None: ...

    def whole_form(self, form: Form) -> Form: ...


def ascending(positions: Tensor) -> Tensor:
    """Indices of slots in ascending position, empty ones (-1) last."""
    last = torch.iinfo(positions.dtype).max
    return positions.masked_fill(positions < 0, last).argsort(-1)


def _in_heads(slot: Tensor) -> tuple[Tensor, ...]:
    """Indices for `index_put_` of one slot in each head; to scatter, a compiler copies them all."""
    entries, heads = (torch.arange(n, device=slot.device) for n in slot.shape[:2])
    return entries[:, None, None], heads[:, None], slot


class Reserved(NamedTuple):
    """Slots for coming tokens; empty ones count as used.

    Attributes:
        next: (batch, kv_heads) int64, the slot of the next token.
        left: how many are empty.
    """

    next: Tensor
    left: int


class SlotBuffers(SlotMemory):
    """The slots of one layer, and where the next token goes.

    Attributes:
        used: slots in use, `positions[..., used:]` are empty. In a padded batch a short entry has
            empty slots below it.
        ordered: whether the slots in use are in ascending position.
        as_read: whether the slots of a padded batch, its padding included, are in the order in
            which they were read.
        reuse_slot: (batch, kv_heads) slot that the next token overwrites; counts as empty for
            everybody but the writer.
        reserved: slots for coming tokens, so that shapes stay as they are; None: the next token
            goes to `reuse_slot`, or behind the others.
        written: (batch, kv_heads, 1) slot of the newest token; None: the last one in use.
    """

    def __init__(
        self,
        form: Form,
        batch: int,
        kv_heads: int,
        statistics: Iterable[str],
        sizing: Sizing,
    ) -> None:
        """Make empty slots."""
        super().__init__(form, batch, kv_heads, statistics, sizing)
        self.used = 0
        self.ordered = self.as_read = True
        self.reuse_slot: Tensor | None = None
        self.reserved: Reserved | None = None
        self.written: Tensor | None = None

    # ---- what is in them

    @property
    def kept(self) -> int:
        """Slots in use that are not waiting to be overwritten, nor for the first time written."""
        waiting = 0 if self.reserved is None else self.reserved.left
        return self.used - waiting - (self.reuse_slot is not None)

    def stored_positions(self) -> Tensor:
        """Positions of the used slots, the one to reuse as empty: (batch, kv_heads, used) int32."""
        positions = self.positions[:, :, : self.used]
        if self.reuse_slot is None:
            return positions
        return positions.scatter(2, self.reuse_slot[..., None], -1)

    def used_slots(self) -> Slots:
        """The used slots as they lie, not copied."""
        used = slice(0, self.used)
        state = {name: number[:, :, used] for name, number in self.state.items()}
        return Slots(self.used_stored(), self.positions[:, :, used], state)

    def used_stored(self) -> Stored:
        """What the used slots hold of keys and values, not copied."""
        return {name: tensor.narrow(2, 0, self.used) for name, tensor in self.stored.items()}

    def sorted_slots(self) -> Slots:
        """Copies of what the kept slots hold, in ascending position, empty ones last."""
        positions, used = self.stored_positions(), slice(0, self.used)
        order = ascending(positions)[..., : self.kept]
        state = {name: t[:, :, used].gather(2, order) for name, t in self.state.items()}
        stored = take_stored(self.used_stored(), order)
        return Slots(stored, positions.gather(2, order), state)

    def joined(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The kept slots and a block behind them; the slots must be compact."""
        if self.used == 0:
            return keys, values
        return self.form.join(self.used_stored(), keys, values)

    def dequantised(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the used slots in the dtype of the model; copies of codes."""
        return self.form.dequantise(self.used_stored())

    def attended(self, *, as_codes: bool) -> tuple[Tensor, Tensor]:
        """Keys and values of the used slots, or the codes that stand for them, not copied."""
        if as_codes or self.form.codec is None:
            stored, used = self.stored, self.used
            if used == self.positions.shape[2]:
                return stored["keys"], stored["values"]
            return stored["keys"].narrow(2, 0, used), stored["values"].narrow(2, 0, used)
        return self.dequantised()

    def chosen(self, slots: Tensor, joined: tuple[Tensor, Tensor] | None) -> Stored:
        """Copy what is stored of some of the used slots, and of tokens behind them.

        What is in a slot already is not rounded once more.

        Args:
            slots: (batch, kv_heads, count) indices into both.
            joined: keys and values of both, (batch, kv_heads, slots + tokens, dim); None: there are
                no tokens behind them.
        """
        if joined is None:
            return take_stored(self.used_stored(), slots)
        if self.used == 0 or self.form.codec is None:
            return self.form.quantise(*(take(tensor, slots) for tensor in joined))
        block = self.form.quantise(*(tensor[:, :, self.used :] for tensor in joined))
        used = self.used_stored()
        return take_stored({name: torch.cat([used[name], block[name]], 2) for name in used}, slots)

    # ---- how tokens enter and leave

    def fit(self, layer: int, keys: Tensor, values: Tensor, new: Tensor, *, padded: bool) -> None:
        """Fit the form to the first block of a text, before it is stored; one device sync.

        Args:
            layer: index in the model.
            keys, values: (batch, kv_heads, tokens, dim) of the block.
            new: (batch or 1, tokens) positions, -1 = padding.
            padded: whether entries may begin later than others.
        """
        if self.form.codec is None or (self.used and not padded):
            return
        empty = (self.positions[:, :, : self.used] < 0).flatten(1).all(1)
        if not self.used or bool(empty.any()):
            self.form = self.form.fitted(layer, keys, values, new, empty)

    @torch.no_grad()
    def write(self, key: Tensor, value: Tensor, *, static: bool) -> None:
        """Write one token: into a reserved slot, behind the others, or into the slot to reuse.

        Args:
            key, value: (batch, kv_heads, 1, dim).
            static: whether nothing but contents of tensors may change.

        """
        used, new = self.used, self.form.quantise(key, value)
        compiling = static and torch.compiler.is_compiling()
        if self.reserved is not None:
            self.written = self.reserved.next[..., None].clone()
            self.reserved.next.add_(1)
            if not static:
                self.use_reserved()
        elif self.reuse_slot is not None:
            if self.shared:
                self.copy_on_write()
            self.written = slot = self.reuse_slot[..., None]
            if not self.grouped:
                for number in self.state.values():
                    if compiling:
                        number.index_put_(_in_heads(slot), number.new_zeros(()))
                    else:
                        number.scatter_(2, slot, 0)
            if not static:
                self.reuse_slot = None
            self.ordered = False
        else:
            if used == self.positions.shape[2]:
                self.grow(used + 1)
            for name, part in new.items():
                self.stored[name].narrow(2, used, 1).copy_(part)
            self.written = None
            self.used = used + 1
            return
        if compiling:
            for name, part in new.items():
                self.stored[name].index_put_(_in_heads(self.written), part)
        else:
            index = self.written[..., None]
            for name, part in new.items():
                self.stored[name].scatter_(2, index.expand_as(part), part)

    def next_slot(self) -> Tensor:
        """Return where a kernel is to write the next token: (batch, kv_heads) int64.

        The kernel raises a reserved slot by one; in place of others a policy chooses the next.
        """
        if self.reserved is not None:
            return self.reserved.next
        assert self.reuse_slot is not None, "shapes are fixed"
        self.ordered = False
        return self.reuse_slot

    @torch.no_grad()
    def place(self, position: int | Tensor, *, static: bool = False) -> None:
        """Note the position of the token that `write` has just written.

        Args:
            position: one number, or (batch or 1,) with -1 where a batch entry had padding instead
                of a token.
            static: as for `write`.
        """
        if isinstance(position, Tensor):
            position = position.to(torch.int32)[:, None, None]
        if self.written is None:
            newest = self.positions.narrow(2, self.used - 1, 1)
            newest.copy_(position) if isinstance(position, Tensor) else newest.fill_(position)
        elif isinstance(position, Tensor) and static and torch.compiler.is_compiling():
            self.positions.index_put_(_in_heads(self.written), position)
        elif isinstance(position, Tensor):
            self.positions.scatter_(2, self.written, position.expand_as(self.written))
        else:
            self.positions.scatter_(2, self.written, position)

    def end_token(self) -> None:
        """Forget where the newest token is, which a compiled step would have to hand out."""
        self.written = None

    def mark_for_reuse(self, slot: Tensor, *, static: bool) -> None:
        """Have the next token written over this slot of each head: (batch, kv_heads) int64."""
        if static and self.reuse_slot is not None:
            self.reuse_slot.copy_(slot)
        else:
            self.reuse_slot = slot

    @torch.no_grad()
    def reserve(self, tokens: int) -> None:
        """Take slots for a number of decoded tokens at once, so that no shape changes while they
        come.

        Only where tokens are appended and nothing is reserved. The next block, and `compact`, give
        the empty slots up. Each batch entry goes on at the slot to reuse, if there is one.
        """
        kept, following = self.kept, self.reuse_slot
        if following is None:
            with torch.inference_mode(False):
                following = torch.full(self.positions.shape[:2], self.used, device=self.device)
        self.reserved, self.reuse_slot = Reserved(following, tokens), None
        self.fill_to(kept + tokens)

    def go_on_behind(self, filled: Tensor, other: SlotBuffers) -> None:
        """Have the next token behind (batch, kv_heads) filled slots, by the way of other slots."""
        if other.reserved is not None:
            self.reserved = Reserved(filled, other.reserved.left)
        else:
            self.reuse_slot = filled

    def use_reserved(self, by: int = 1) -> None:
        """Count one reserved slot as taken; append behind all slots again after the last."""
        if self.reserved is not None:
            left = self.reserved.left - by
            self.reserved = Reserved(self.reserved.next, left) if left > 0 else None

    @torch.no_grad()
    def compact(self) -> None:
        """Put the kept slots in ascending position at the front, and forget the slot to reuse."""
        if self.reserved is not None:
            self.used, self.reserved = self.kept, None
        if not self.ordered or self.reuse_slot is not None:
            self.replace(self.sorted_slots())

    @torch.no_grad()
    def extend(self, keys: Tensor, values: Tensor, positions: Tensor, state: State) -> None:
        """Append a block; `positions` and `state` cover the kept slots as well."""
        total = positions.shape[2]
        new = slice(self.used, total)
        self.grow(total)
        for name, part in self.form.quantise(keys, values).items():
            self.stored[name][:, :, new] = part
        self.positions[:, :, new] = positions[:, :, new]
        for name, number in state.items():
            self.state[name][:, :, :total] = number
        self.used = total

    @torch.no_grad()
    def replace(self, slots: Slots) -> None:
        """Make these the only slots in use; they come in ascending position."""
        count = slots.positions.shape[2]
        self.copy_on_write()
        self.grow(count)
        for name, part in slots.stored.items():
            self.stored[name][:, :, :count] = part
        self.positions[:, :, :count] = slots.positions
        for name, number in slots.state.items():
            if name not in self.state:
                self.add_number(name)
            self.state[name][:, :, :count] = number
        if count < self.positions.shape[2]:
            self.positions[:, :, count:].fill_(-1)
            for number in self.state.values():
                number[:, :, count:].fill_(0)
        self.used, self.ordered, self.as_read = count, True, False
        self.reuse_slot = self.reserved = None

    def fill_to(self, slots: int) -> None:
        """Count empty slots as used, so that batch entries of different budgets can grow."""
        self.grow(slots)
        self.used = max(self.used, slots)

    def read_out_of_order(self) -> None:
        """Note that the padding of a batch is not where it was."""
        self.as_read = False

    def use(self, slots: int) -> None:
        """Count the first slots as the used ones; those behind them are empty."""
        self.used = slots

    @torch.no_grad()
    def cut_off(self, slots: int) -> Tensor:
        """Empty the last slots in use, which are compact.

        Returns:
            (batch, kv_heads, slots) positions that were in them.
        """
        if self.shared:  # what comes next is written where a cache to go back to reads
            self.copy_on_write()
        empty = slice(self.used - slots, self.used)
        gone = self.positions[:, :, empty].clone()
        self.positions[:, :, empty] = -1
        self.used -= slots
        return gone

    def clear(self) -> None:
        """Give back the memory of all slots."""
        self.used, self.reuse_slot, self.ordered = 0, None, True
        self.shrink(0)

    # ---- batch entries and static steps

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        """Let everything follow the batch entries."""
        super().reindex(change)
        self.reuse_slot = None if self.reuse_slot is None else change(self.reuse_slot)
        if self.reserved is not None:
            self.reserved = Reserved(change(self.reserved.next), self.reserved.left)

    def fix(self, addresses: Addresses) -> None:
        """Have what a static step replaces at addresses that stay."""
        if self.reuse_slot is not None:
            self.copy_on_write()
            self.reuse_slot = addresses.keep("reuse_slot", self.reuse_slot)
        if self.reserved is not None:
            following = addresses.keep("reserved", self.reserved.next)
            self.reserved = Reserved(following, self.reserved.left)

    def tensors(self) -> list[Tensor]:
        """The tensors that a static step reads or writes, where they are."""
        following = None if self.reserved is None else self.reserved.next
        moved = [tensor for tensor in (self.reuse_slot, following) if tensor is not None]
        stored = (*self.stored.values(), *self.form.tensors)
        return [*stored, self.positions, *self.state.values(), *moved]
