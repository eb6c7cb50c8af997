"""The memory of slots: how it grows, shrinks, is shared with a cache to go back to, and counted.

A layer's budget and the tokens that it expects decide how its buffers grow. A meter counts the
bytes of keys and values wherever buffers grow and shrink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvtool.cache.slots.slot_form import Form, Stored
from kvtool.planning.bytes import STEP, grown
from kvtool.policies.numbers import ALL_HERE, KVHeads


class ByteMeter:
    """The bytes that all layers of a cache hold, and the most that they have held.

    Attributes:
        promised: whether bytes have been promised, so that heads which hold different counts take
            no slot more than they hold: each count has buffers of its own.
        held: bytes of all key and value buffers now.
        peak: the most that there were while a block of a prompt ran, the block itself included.
    """

    def __init__(self, *, promised: bool = False) -> None:
        self.promised = promised
        self.held = self.peak = 0

    def change(self, by: int) -> None:
        """Note the bytes by which buffers have grown, or shrunk."""
        self.held += by

    def run(self, block: int) -> None:
        """Note the bytes of a block that runs beside what is held."""
        self.peak = max(self.peak, self.held + block)

    def forget(self) -> None:
        """Forget the peak."""
        self.peak = 0


@dataclass(frozen=True)
class LayerBudget:
    """Tokens that each batch entry of a layer may keep.

    Attributes:
        tokens: one number, or int64 (batch, 1, 1); 0 where nothing is ever evicted.
        min_budget, max_budget: the smallest and the largest of them, known to the host.
        whole: whether the running block has been added to it, and nothing is cut at its end.
        by_head: (batch, kv_heads) int64, what each KV head may keep, where heads have budgets of
            their own; `tokens` is their mean then. None: what the layer may.
    """

    tokens: int | Tensor = 0
    min_budget: int = 0
    max_budget: int = 0
    whole: bool = False
    by_head: Tensor | None = None

    @classmethod
    def of(
        cls,
        entries: list[int],
        device: torch.device | None = None,
        by_head: Tensor | None = None,
    ) -> LayerBudget:
        """Make the budget of batch entries from the tokens that each may keep."""
        low, high = min(entries), max(entries)
        if low == high:
            return cls(high, low, high, by_head=by_head)
        tokens = torch.tensor(entries, device=device)[:, None, None]
        return cls(tokens, low, high, by_head=by_head)

    def raised(self, new: list[int], device: torch.device) -> LayerBudget:
        """Return the budget with more tokens for each batch entry."""
        more = new[0] if len(set(new)) == 1 else torch.tensor(new, device=device)[:, None, None]
        low, high = self.min_budget + min(new), self.max_budget + max(new)
        by_head = self.by_head
        if by_head is not None:
            by_head = by_head + torch.tensor(new, device=by_head.device)[:, None]
        return LayerBudget(self.tokens + more, low, high, whole=True, by_head=by_head)

    def split(self, by_head: Tensor | None) -> LayerBudget:
        """Return the same budget, of which each KV head may keep so much."""
        return replace(self, by_head=by_head)

    def reindexed(self, change: Callable[[Tensor], Tensor]) -> LayerBudget:
        """Return the budget of other batch entries, which `change` brings about."""
        tokens, by_head = self.tokens, self.by_head
        if by_head is None and not isinstance(tokens, Tensor):
            return self
        tokens = change(tokens) if isinstance(tokens, Tensor) else tokens
        return replace(self, tokens=tokens, by_head=None if by_head is None else change(by_head))


@dataclass(frozen=True)
class Growth:
    """The capacity that buffers take.

    Attributes:
        when: when slots are cut to the budget: after every token, at a prompt's end, or never.
        max_budget: the largest budget of a batch entry.
        expected: slots in use once all expected tokens have been decoded; buffers grow up to these
            first.
        exact: whether buffers are never larger than what is asked for.
        spare: slots above the budget, for tokens that come before some are cut.
    """

    when: Literal["always", "prompt", "never"]
    max_budget: int = 0
    expected: int = 0
    exact: bool = False
    spare: int = 0

    @property
    def limit(self) -> int:
        """Slots of a budget that is always held, with those of tokens that come before a cut."""
        return self.max_budget + self.spare

    def capacity(self, slots: int, before: int) -> int:
        """Return the slots to allocate where `slots` are asked for and `before` are there."""
        capacity = grown(before, slots)
        expected = self.expected
        if self.exact:
            capacity = slots
        elif self.when == "always":
            capacity = max(self.limit, slots) if capacity >= self.max_budget else capacity
            expected = min(expected, self.limit)
        elif self.when == "prompt" and slots <= self.max_budget:
            capacity = min(capacity, self.max_budget)
        if slots <= expected and capacity + STEP >= expected:
            capacity = expected
        return max(capacity, slots)  # heads of different counts, side by side, may exceed the mean


@dataclass(frozen=True)
class Sizing:
    """How the buffers of a layer grow, and what counts the bytes of all layers."""

    growth: Growth
    meter: ByteMeter


State = dict[str, Tensor]


class SlotMemory:
    """The tensors of the slots of one layer.

    Attributes:
        form: how keys, after RoPE, and values lie in slots.
        stored: what they are in that form, (batch, kv_heads, capacity, ..) each.
        positions: (batch, kv_heads, capacity) int32, the true position of the token in each slot,
            -1 = empty.
        state: the policy's numbers for each slot, (batch, kv_heads, capacity) float32.
        kv_heads: KV heads that are here.
        heads: all KV heads of the layer, of which this process may hold a part.
        sizing: how they grow, and what counts the bytes of keys and values.
        shared: whether a cache that will be gone back to reads keys and values, too. Whoever
            writes over a slot in use calls `copy_on_write` first.
        grouped: whether positions and state lie in tensors of a group of layers, which clears a
            slot and places a token by itself.
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
        self.form, self.kv_heads = form, kv_heads
        self.heads: KVHeads = ALL_HERE
        sizes, sample = (batch, kv_heads, 0), form.quantise(*form.sample)
        self.stored: Stored = {
            name: _zeros(tensor, (*sizes, tensor.shape[-1])) for name, tensor in sample.items()
        }
        one = form.sample[0]
        self.positions = _zeros(one, sizes, torch.int32)
        self.state: State = {name: _zeros(one, sizes, torch.float32) for name in statistics}
        self.sizing, self.shared, self.grouped = sizing, False, False

    @property
    def keys(self) -> Tensor:
        """Keys, or their codes, of all slots: (batch, kv_heads, capacity, ..)."""
        return self.stored["keys"]

    @property
    def values(self) -> Tensor:
        """Values, or their codes, of all slots."""
        return self.stored["values"]

    @property
    def batch(self) -> int:
        """Batch entries."""
        return self.positions.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        return self.positions.device

    @property
    def capacity(self) -> int:
        """Slots that the buffers have."""
        return self.positions.shape[2]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the key and value buffers, scales included."""
        return sum(t.untyped_storage().nbytes() for t in self.stored.values())

    @property
    def token_bytes(self) -> int:
        """Bytes of the key and value of one token in one KV head, as they are stored."""
        return sum(t.shape[-1] * t.element_size() for t in self.stored.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of positions, of the policy's numbers and of what the form holds of the text."""
        held = (self.positions, *self.state.values())
        return self.form.nbytes + sum(t.numel() * t.element_size() for t in held)

    def set_heads(self, heads: KVHeads) -> None:
        """Say which of all KV heads are here."""
        self.heads = heads

    def add_number(self, name: str) -> None:
        """Have one more number beside each slot, 0 so far."""
        self.state[name] = _zeros(self.positions, tuple(self.positions.shape), torch.float32)

    # ---- growing and shrinking

    def set_growth(self, growth: Growth) -> None:
        """Say how the buffers grow from here on."""
        self.sizing = replace(self.sizing, growth=growth)

    def trim(self, *, full: bool) -> None:
        """Give back memory that the tokens to come will not need.

        Args:
            full: whether the layer holds a budget that is used up.
        """
        expected = self.sizing.growth.expected
        if not self.shared:  # what another cache reads would be copied, not given back
            self.shrink(max(expected, self.sizing.growth.limit) if full else expected)

    @torch.no_grad()
    def shrink(self, count: int) -> None:
        """Give back the memory of all but some slots, those in use or more."""
        if count >= self.capacity:
            return
        before = self.kv_bytes
        with torch.inference_mode(False):
            self.stored = {name: t[:, :, :count].clone() for name, t in self.stored.items()}
            self.positions = self.positions[:, :, :count].clone()
            self.state = {name: number[:, :, :count].clone() for name, number in self.state.items()}
        self.shared = False
        self.sizing.meter.change(self.kv_bytes - before)

    def grow(self, slots: int) -> None:
        if slots <= self.capacity:
            return
        before = self.kv_bytes
        capacity = self.sizing.growth.capacity(slots, self.capacity)
        self.stored = {name: _grown(t, capacity, 0) for name, t in self.stored.items()}
        self.positions = _grown(self.positions, capacity, -1)
        self.state = {name: _grown(t, capacity, 0) for name, t in self.state.items()}
        self.shared = False
        self.sizing.meter.change(self.kv_bytes - before)

    def share(self) -> None:
        """Let a cache to go back to read keys and values as they are now."""
        self.shared = True

    def copy_on_write(self) -> None:
        """Have keys and values alone, before a slot in use is written over."""
        if self.shared:
            with torch.inference_mode(False):
                self.stored = {name: tensor.clone() for name, tensor in self.stored.items()}
            self.shared = False

    # ---- batch entries and groups

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        """Let keys, values, positions and state follow the batch entries."""
        before = self.kv_bytes
        self.stored = {name: change(tensor) for name, tensor in self.stored.items()}
        self.positions = change(self.positions)
        self.state = {name: change(t) for name, t in self.state.items()}
        self.form = self.form.reindexed(change)
        self.sizing.meter.change(self.kv_bytes - before)

    def set_form(self, form: Form) -> None:
        """Say how keys and values lie in slots from here on; those in use lie so already."""
        self.form = form

    def drop(self) -> None:
        """Count the memory as given back: it is not read again."""
        self.sizing.meter.change(-self.kv_bytes)

    def group(self, positions: Tensor, state: State) -> None:
        """Have positions and state in tensors of a group of layers."""
        self.positions, self.state, self.grouped = positions, state, True

    def ungroup(self) -> None:
        """Have positions and state alone again."""
        with torch.inference_mode(False):
            self.positions = self.positions.clone()
            self.state = {name: number.clone() for name, number in self.state.items()}
        self.grouped = False


def _zeros(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    # Zeros, since an unused slot may meet a weight of 0 and must not be NaN. Outside inference
    # mode, since a buffer made inside it could not be written outside.
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype or like.dtype, device=like.device)


def _grown(tensor: Tensor, slots: int, fill: int) -> Tensor:
    shape = (*tensor.shape[:2], slots, *tensor.shape[3:])
    with torch.inference_mode(False):
        grown = torch.full(shape, fill, dtype=tensor.dtype, device=tensor.device)
    grown[:, :, : tensor.shape[2]] = tensor
    return grown
