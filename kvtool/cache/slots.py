"""Slots: the fixed buffers of one layer, what is in them, and how tokens enter and leave.

A slot holds the key and value of one token and its true position. Slot order is free: in steady
state nothing moves, the next token is written over the victim of the step before. An empty slot has
position -1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from kvtool.cache.calibration import Calibration
from kvtool.cache.reading import Reading, reordered
from kvtool.errors import KvtoolError
from kvtool.maths.selection import take
from kvtool.planning.growth import STEP, grown
from kvtool.policies.evicted.calidrop import CaliDrop
from kvtool.policies.evicted.merging import Merging
from kvtool.policies.heads import ALL_HERE, KVHeads
from kvtool.policies.numbers import Count, State
from kvtool.policies.parts import Read
from kvtool.policies.policy import Policy

if TYPE_CHECKING:
    from kvtool.cache.density import Density
    from kvtool.cache.lanes import Lanes
    from kvtool.cache.rotary import Rotation
    from kvtool.cache.together import Group


class SlotLayer(CacheLayerMixin):
    """One attention layer of the cache.

    Attributes:
        keys: (batch, kv_heads, capacity, head_dim) in the model's dtype, after RoPE.
        values: (batch, kv_heads, capacity, value_dim).
        positions: (batch, kv_heads, capacity) int32, the true position of the token in each slot,
            -1 = empty.
        state: the policy's numbers for each slot, (batch, kv_heads, capacity) float32.
        used: slots in use, `positions[..., used:]` are empty. In a padded batch a short row has
            empty slots below it.
        seen: tokens seen, padding included: what transformers calls the sequence length.
        lengths: (batch,) int64 tokens seen without padding; None where no row is padded (then it is
            `seen`).
        pending: (batch, kv_heads) slot that the next token overwrites; counts as empty for
            everybody but the writer.
        next: (batch, kv_heads) int64, the slot of the next token where room for `room_until` tokens
            seen is held, so that shapes stay as they are; empty slots count as used then.
        clock: (1, 1, 1) int64, `seen` on the device, during a step that may neither read nor change
            numbers on the host: see `kvtool.cache.static`.
        group: the layers that this one decides with, None while it decides alone.
        budget: tokens that a row may keep, one number or (batch, 1, 1); set when a prompt begins.
            None: no limit.
        least, most: smallest and largest budget of the rows, known to the host.
        foreseen: slots that will be in use once all expected tokens have been decoded; the buffers
            grow up to these first.
        tight: whether heads of different counts take no slot more than they hold, each count in a
            store of its own: bytes have been promised.
        held_back: whether a prompt is stored whole until all layers have been seen.
        waiting: of what is held back, the scores (batch, kv_heads, slots) and the block's tokens.
        density: column sums of the attention of what is held back (D2O); None: nothing is.
        lanes: where the tokens are while KV heads hold different counts; the layer's own buffers
            are empty then.
        head_budgets: (batch, kv_heads) int64, what each head may keep where heads differ.
        head_rank: (kv_heads,) int64, place of each head among the `heads_ranked` of the model, 0
            for the one that most needs the whole text; None where nobody has ranked them.
        heads: all KV heads of the layer, of which this process may hold a part.
        reading: how decode steps read a part of the slots, from the end of a prompt to the next;
            None: they read all.
        marked: (batch, kv_heads, slots) positions that a policy which only selects chose at the end
            of the prompt, -1 at the end of rows with fewer; None: all.
        tail: the last queries, (batch, heads, rows, head_dim), and their positions, (batch, rows),
            of a prompt in blocks that is cut once, until it ends.
        pairs_read: keys and values that the last decoded token has read, per KV head.
        window: width of the layer's own sliding window, in tokens, or None.
        nest: the layers of free budget above this one, where each keeps part of what the one above
            it keeps.
        memory: what merging remembers beside the slots (thresholds), tensors whose first axis is
            the batch.
        calibration: where evicted tokens are set aside to calibrate by, None if they are not.
        rotation: how keys are turned to their places among the kept tokens; None: they are not.
        reach: no key has to be turned by more positions than this.
        lent: whether a cache that will be gone back to reads the `buffers`, too.

    What a layer holds is copied deeply when its cache is; only its `buffers` are not, where the
    copy is one to go back to. Whoever writes over a slot in use of theirs calls `own` first.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, index: int, policy: Policy, window: int | None = None) -> None:
        super().__init__()
        self.index = index
        self.policy = policy
        self.window = window
        self.is_sliding = window is not None
        self.nest: list[SlotLayer] = []
        self.head_rank: Tensor | None = None
        self.heads_ranked = 0
        self.heads: KVHeads = ALL_HERE
        self.rotation: Rotation | None = None
        self.tight = False
        self._clear()

    def _clear(self) -> None:
        self.is_initialized = False
        self.keys = self.values = self.positions = None
        self.state: State = {}
        self.used = self.seen = 0
        self.lengths: Tensor | None = None
        self.pending: Tensor | None = None
        self.written: Tensor | None = None
        self.next: Tensor | None = None
        self.clock: Tensor | None = None
        self.room_until = 0
        self.ordered = True
        self.group: Group | None = None
        self.lent = False
        self.reach = 0
        self.budget: Count | None = None
        self.least = self.most = self.foreseen = 0
        self.held_back = False
        self.waiting: tuple[Tensor, Count] | None = None
        self.density: Density | None = None
        self.lanes: Lanes | None = None
        self.head_budgets: Tensor | None = None
        self.memory: State = {}
        self.calibration: Calibration | None = None
        if isinstance(self.policy.on_evict, CaliDrop):
            self.calibration = Calibration(self.policy.on_evict)
        self.reading: list[Reading] | None = None
        self.marked: Tensor | None = None
        self.tail: tuple[Tensor, Tensor] | None = None
        self.pairs_read: float = 0
        self.unattended = False  # between taking in tokens and attending them

    # ---- what transformers asks

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads = key_states.shape[:2]
        self.keys = _zeros(key_states, (batch, heads, 0, key_states.shape[-1]))
        self.values = _zeros(value_states, (batch, heads, 0, value_states.shape[-1]))
        self.positions = _zeros(key_states, (batch, heads, 0), torch.int32)
        self.state = {
            name: _zeros(key_states, (batch, heads, 0), torch.float32)
            for name in self.policy.statistics
        }
        if isinstance(self.policy.on_evict, Merging):
            with torch.inference_mode(False):
                self.memory = self.policy.on_evict.start(batch, heads, self.device)
        self.is_initialized = True

    def get_seq_length(self) -> int | Tensor:
        return self.seen if self.clock is None else self.clock.view(()) - 1

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that attention will see, and how many tokens lie before them."""
        if self.clock is not None:
            return self.used, 0  # of no interest to the mask of a decoded token
        kept = self.kept
        return kept + query_length, self.seen - kept

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Take in the keys and values of a block, or of one decoded token.

        A block is stored when it has been attended; until then the cache holds [kept slots, block].
        A decoded token is written at once, over the pending victim or into the next free slot.

        Returns:
            Keys and values to attend to.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not kwargs.get("decoding", False):
            self.reading = None
            self.settle()
            self.seen += key_states.shape[2]
            return self.joined(key_states, value_states)
        if self.clock is None:
            self.seen += 1
        if self.lanes is not None:
            return key_states, value_states  # each store takes in its own part of them
        return self._write(key_states, value_states)

    def reset(self) -> None:
        self._clear()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise KvtoolError(
                "an evicting cache cannot be cropped, what was evicted is gone",
                hint="generate without an assistant model and without prompt lookup",
            )

    @property
    def batch_size(self) -> int:
        return self.keys.shape[0] if self.is_initialized else -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map_rows(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_rows(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_rows(lambda t: t[indices.to(t.device)])

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if not self.is_initialized:
            return
        apart = self.lanes is not None
        if apart:
            self.settle()
        self.keys, self.values = change(self.keys), change(self.values)
        self.positions = change(self.positions)
        self.state = {name: change(t) for name, t in self.state.items()}
        self.memory = {name: change(t) for name, t in self.memory.items()}
        if self.calibration is not None:
            self.calibration.map_rows(change)
        for name in ("pending", "next", "lengths", "budget", "head_budgets", "marked"):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                setattr(self, name, change(value))
        if self.reading is not None:
            self.reading = reordered(self.reading, change)
        if apart:
            self.split_by_head()

    # ---- what is stored

    @property
    def reader(self) -> Read | None:
        """What this layer's decode steps look at; None: all that is stored."""
        reader = None if self.window is not None else self.policy.reader
        return None if reader is None or self.index < reader.skip_layers else reader

    @property
    def capacity(self) -> int:
        """Slots that the buffers have."""
        return self.keys.shape[2] if self.is_initialized else 0

    @property
    def kept(self) -> int:
        """Slots in use that are not waiting to be overwritten, nor for the first time written."""
        empty = 0 if self.next is None else self.room_until - self.seen
        return self.used - empty - (self.pending is not None)

    @property
    def count(self) -> Count:
        """Tokens of each row so far: one number, or int64 (batch or 1, 1, 1)."""
        if self.ragged:
            return self.lengths[:, None, None]
        return self.seen if self.clock is None else self.clock

    @property
    def cuts_itself(self) -> bool:
        """Whether the layer holds its budget after every token by its own choice of victims."""
        score = self.policy.ranking
        return score.when == "always" and score.layers != "same"

    @property
    def limit(self) -> int:
        """Slots of a budget that is always held: one more takes in a token before one leaves."""
        return self.most + (not self.appends)

    @property
    def ragged(self) -> bool:
        """Whether rows differ in length: short rows have empty slots among the used ones."""
        return self.lengths is not None

    @property
    def masked(self) -> bool:
        """Whether some of the used slots may be empty."""
        return self.lengths is not None or self.next is not None

    def stored_positions(self) -> Tensor:
        """Positions of the used slots, pending ones as empty: (batch, kv_heads, used) int32."""
        if self.lanes is not None:
            return self.lanes.positions()
        positions = self.positions[:, :, : self.used]
        if self.pending is None:
            return positions
        return positions.scatter(2, self.pending[..., None], -1)

    def allocated_bytes(self) -> int:
        """Bytes of the key and value buffers."""
        if self.lanes is not None:
            return sum(store.allocated_bytes() for store in self.lanes.stores)
        return _bytes(self.keys) + _bytes(self.values) if self.is_initialized else 0

    def filled_bytes(self) -> int:
        """Bytes of the keys and values of filled slots."""
        if not self.is_initialized:
            return 0
        filled = int((self.stored_positions() >= 0).sum())
        return filled * self.token_bytes()

    def token_bytes(self) -> int:
        """Bytes of the key and value of one token in one KV head."""
        return (
            self.keys.shape[-1] * self.keys.element_size()
            + self.values.shape[-1] * self.values.element_size()
        )

    def bytes_read(self) -> float:
        """Bytes of keys, values and tables that the last decoded token has read."""
        if not self.is_initialized:
            return 0
        return self.pairs_read * self.token_bytes() * self.keys.shape[0] * self.keys.shape[1]

    def state_bytes(self) -> int:
        """Bytes beside the keys and values: positions, the policy's numbers, a reader's tables."""
        if self.lanes is not None:
            apart = sum(store.state_bytes() for store in self.lanes.stores)
            return apart + self._memory_bytes()
        if not self.is_initialized:
            return 0
        held = [self.positions, *self.state.values()]
        held += [] if self.marked is None else [self.marked]
        held += [t for reading in self.reading or [] for t in reading.tensors()]
        return sum(t.numel() * t.element_size() for t in held) + self._memory_bytes()

    def _memory_bytes(self) -> int:
        held = 0 if self.calibration is None else self.calibration.device_bytes()
        return held + sum(t.numel() * t.element_size() for t in self.memory.values())

    # ---- going back

    @property
    def buffers(self) -> list[Tensor]:
        """The large tensors, which a cache to go back to shares: new slots come behind old ones."""
        stores = [store for store in self.stores if store.is_initialized]
        return [each for store in stores for each in (store.keys, store.values)]

    def lend(self) -> None:
        """Let a cache to go back to read the buffers as they are now."""
        for store in self.stores:
            store.lent = True

    def own(self) -> None:
        """Have the key and value buffers alone, before a slot in use is written over."""
        if self.lent:
            with torch.inference_mode(False):
                self.keys, self.values = self.keys.clone(), self.values.clone()
            self.lent = False

    # ---- how tokens enter and leave

    def joined(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The kept slots and a block behind them; the slots must be settled."""
        if self.used == 0:
            return keys, values
        kept = slice(0, self.used)
        return (
            torch.cat([self.keys[:, :, kept], keys], 2),
            torch.cat([self.values[:, :, kept], values], 2),
        )

    @torch.no_grad()
    def _write(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.next is not None:
            self._write_at(self.next[..., None].clone(), key, value)
            self.next.add_(1)
            if self.clock is None:
                self.leave_room()
        elif self.pending is None:
            self._reserve(self.used + 1)
            self.keys[:, :, self.used] = key[:, :, 0]
            self.values[:, :, self.used] = value[:, :, 0]
            self.written = None
            self.used += 1
        else:
            self.own()
            slot = self.pending[..., None]
            self._write_at(slot, key, value)
            if self.group is None:
                for number in self.state.values():
                    number.scatter_(2, slot, 0)
            if self.clock is None:
                self.pending = None
            self.ordered = False
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def _write_at(self, slot: Tensor, key: Tensor, value: Tensor) -> None:
        self.keys.scatter_(2, slot[..., None].expand_as(key), key)
        self.values.scatter_(2, slot[..., None].expand_as(value), value)
        self.written = slot

    def give_up(self, victim: Tensor) -> None:
        """Have the next token written over this slot of each head: (batch, kv_heads) int64."""
        if self.clock is None:
            self.pending = victim
        else:
            self.pending.copy_(victim)

    @property
    def stores(self) -> list[SlotLayer]:
        """The layers that hold the slots: itself, or those of its lanes."""
        return [self] if self.lanes is None else self.lanes.stores

    @property
    def appends(self) -> bool:
        """Whether decoded tokens are added and never take another's place."""
        return self.policy.score.when != "always"

    @property
    def grows(self) -> bool:
        """Whether the layer holds a budget that the next token does not fill yet."""
        return not self.appends and self.pending is None

    @torch.no_grad()
    def hold_room(self, tokens: int) -> None:
        """Take slots for so many decoded tokens at once, so that no shape changes while they come.

        Only for layers that append and hold no room already. The next block, and `settle`, give
        the empty slots up.
        """
        self.room_until = self.seen + tokens
        if self.lanes is not None:
            for store in self.lanes.stores:
                store.hold_room(tokens)
            return
        with torch.inference_mode(False):
            self.next = torch.full(self.positions.shape[:2], self.used, device=self.device)
        self.fill_to(self.used + tokens)

    def leave_room(self) -> None:
        """Append behind all slots again, if the room that was held is used up."""
        if self.seen >= self.room_until:
            self.next = None

    @torch.no_grad()
    def place(self, position: int | Tensor) -> None:
        """Note the position of the token that `update` has just written.

        Args:
            position: one number, or (batch or 1,) with -1 where a row had padding instead of a
                token.
        """
        if self.group is not None:
            return  # it has placed the token of every layer already
        if isinstance(position, Tensor):
            position = position.to(torch.int32)[:, None, None]
        if self.written is None:
            self.positions[:, :, self.used - 1 : self.used] = position
        elif isinstance(position, Tensor):
            self.positions.scatter_(2, self.written, position.expand_as(self.written))
        else:
            self.positions.scatter_(2, self.written, position)

    @torch.no_grad()
    def settle(self) -> None:
        """Put the kept slots in ascending position at the front, and forget the pending victim.

        Heads that keep different counts come side by side, with empty slots where one is shorter.
        """
        if self.lanes is not None:
            whole, self.lanes = self.lanes.side_by_side(), None
            self.replace(*whole)
            return
        if self.next is not None:
            self.used, self.next, self.room_until = self.kept, None, 0
        if self.ordered and self.pending is None:
            return
        self.replace(*self.sorted_slots())

    def sorted_slots(self) -> tuple[Tensor, Tensor, Tensor, State]:
        """Copies of what the kept slots hold, in ascending position, empty ones last."""
        if self.lanes is not None:
            return self.lanes.side_by_side()
        positions, order = self.stored_positions(), self._ascending()
        keys, values = self.keys[:, :, : self.used], self.values[:, :, : self.used]
        state = {name: t[:, :, : self.used].gather(2, order) for name, t in self.state.items()}
        return take(keys, order), take(values, order), positions.gather(2, order), state

    def _ascending(self) -> Tensor:
        """Indices of the kept slots in ascending position, empty ones last."""
        positions = self.stored_positions()
        last = torch.iinfo(positions.dtype).max
        return positions.masked_fill(positions < 0, last).argsort(-1)[..., : self.kept]

    @torch.no_grad()
    def extend(self, keys: Tensor, values: Tensor, positions: Tensor, state: State) -> None:
        """Append a block; `positions` and `state` cover the kept slots as well."""
        total = positions.shape[2]
        new = slice(self.used, total)
        self._reserve(total)
        self.keys[:, :, new], self.values[:, :, new] = keys, values
        self.positions[:, :, new] = positions[:, :, new]
        for name, number in state.items():
            self.state[name][:, :, :total] = number
        self.used = total

    @torch.no_grad()
    def replace(self, keys: Tensor, values: Tensor, positions: Tensor, state: State) -> None:
        """Make these the only slots in use; they come in ascending position."""
        count = positions.shape[2]
        self.own()
        self._reserve(count)
        self.keys[:, :, :count], self.values[:, :, :count] = keys, values
        self.positions[:, :, :count] = positions
        self.positions[:, :, count:] = -1
        for name, number in state.items():
            self.state[name][:, :, :count] = number
            self.state[name][:, :, count:] = 0
        self.used, self.pending, self.next, self.ordered = count, None, None, True
        self.room_until = 0

    def split_by_head(self) -> None:
        """Store heads of different counts apart, by their `head_budgets`."""
        from kvtool.cache.lanes import split_lanes

        split_lanes(self, *self.sorted_slots())

    def clear_slots(self) -> None:
        """Give back the memory of all slots."""
        self.used, self.pending, self.ordered = 0, None, True
        self.shrink(0)

    @torch.no_grad()
    def shrink(self, count: int) -> None:
        """Give back the memory of all but some slots, those in use or more."""
        if count >= self.capacity:
            return
        with torch.inference_mode(False):
            self.keys = self.keys[:, :, :count].clone()
            self.values = self.values[:, :, :count].clone()
            self.positions = self.positions[:, :, :count].clone()
            self.state = {name: number[:, :, :count].clone() for name, number in self.state.items()}
        self.lent = False

    @property
    def expected(self) -> int:
        """Decoded tokens that are still to come, as far as is known."""
        return max(0, self.stores[0].foreseen - self.stores[0].used)

    def foresee(self, tokens: int) -> None:
        """Say how many tokens will be decoded, and give back the memory that is not for them."""
        for store in self.stores:
            store.foreseen = store.used + tokens
            full = not store.appends and store.used >= store.least
            if not store.lent:  # what another cache reads would be copied, not given back
                store.shrink(max(store.foreseen, store.limit) if full else store.foreseen)

    def fill_to(self, slots: int) -> None:
        """Count empty slots as used, so that rows of different budgets can grow into them."""
        self._reserve(slots)
        self.used = max(self.used, slots)

    def _reserve(self, slots: int) -> None:
        """Have room for so many slots, at most one more than a budget that is always held."""
        capacity = self.capacity
        if slots <= capacity:
            return
        roomy = grown(capacity, slots)
        when, limit, foreseen = self.policy.score.when, self.limit, self.foreseen
        if self.held_back:
            roomy = slots
        elif when == "always":
            roomy = max(limit, slots) if roomy >= self.most else roomy
            foreseen = min(foreseen, limit)
        elif when == "prompt" and slots <= self.most:
            roomy = min(roomy, self.most)
        if slots <= foreseen:
            roomy = foreseen if roomy + STEP >= foreseen else roomy
        roomy = max(roomy, slots)  # heads of different counts, side by side, may exceed the mean
        self.keys = _grown(self.keys, roomy, 0)
        self.values = _grown(self.values, roomy, 0)
        self.positions = _grown(self.positions, roomy, -1)
        self.state = {name: _grown(t, roomy, 0) for name, t in self.state.items()}
        self.lent = False


class HybridSlotLayer(LinearAttentionLayer, SlotLayer):
    """A layer with attention and a recurrence side by side; the attention half is compressed."""

    is_compileable = False
    is_croppable = False

    def __init__(
        self, index: int, policy: Policy, window: int | None = None, number_of_states: int = 1
    ) -> None:
        SlotLayer.__init__(self, index, policy, window)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args, **kwargs) -> None:
        if len(args) == 2:
            SlotLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        SlotLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        SlotLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        SlotLayer.crop(self, tokens_to_remove)

    def get_max_length(self) -> int:
        return -1


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


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
