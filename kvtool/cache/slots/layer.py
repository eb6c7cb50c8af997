"""An attention layer of the cache: counts, a budget, slots, and a part for each feature.

Two kinds serve particular models. `ChunkedSlotLayer` attends to the chunk of the text that its
token is in, and keeps just that. `HybridSlotLayer` has a recurrence beside the attention, of which
the attention half is compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from kvtool.cache.slots.buffers import Ragged, SlotBuffers, Slots
from kvtool.cache.slots.counts import TokenCounts, Unwritten
from kvtool.cache.slots.part import Part, Parts
from kvtool.cache.slots.sizing import ByteMeter, Growth, LayerBudget, Sizing
from kvtool.cache.slots.slot_form import Form, make_form
from kvtool.policies.policy import Policy


class SlotLayer(TokenCounts, CacheLayerMixin):
    """One attention layer of the cache.

    Attributes:
        index: of the layer in the model.
        policy: what stays.
        window: width of the layer's own sliding window, in tokens, or None.
        parts: what features keep beside the slots, by name.
        sizing: how buffers grow, and what counts the bytes of all layers.
        slots: of all heads, from the first token on; empty while heads hold different counts.
        budget: how many each batch entry may keep; set when a prompt begins.
        ragged: where the tokens are while KV heads hold different counts; the layer's own slots are
            empty then. None: they hold equally many.
        pairs_read: keys and values that the last decoded token has read, per KV head.
        attends_codes: whether decoded tokens attend to codes, which no model looks at in between.
        unattended: whether tokens have been taken in that are not attended yet, or a token that is
            written as it is attended.

    What a layer holds is copied deeply when its cache is; only keys and values are not, where the
    copy is one to go back to.
    """

    is_compileable = False
    slots: SlotBuffers
    chunked = False  # whether windows are side by side in place of sliding

    def __init__(
        self,
        index: int,
        policy: Policy,
        window: int | None = None,
        parts: Iterable[Part] = (),
        meter: ByteMeter | None = None,
        *,
        shown: bool = False,
    ) -> None:
        self.attends_codes = policy.codec is not None and not shown
        self.index, self.policy, self.window = index, policy, window
        self.parts = Parts(parts)
        self.is_initialized = False
        self._clear(meter or ByteMeter())

    def _clear(self, meter: ByteMeter) -> None:
        if self.is_initialized:
            self._give_back()
            del self.slots
        self.is_initialized = False
        growth = Growth(self.policy.when, spare=self.policy.spare)
        self.sizing = Sizing(growth, meter)
        self.ragged: Ragged | None = None
        self.count_from(0, None)
        self.budget = LayerBudget()
        self.pairs_read: float = 0
        self.unattended: bool | Unwritten = False

    def _give_back(self) -> None:
        for each in self.stores:
            each.slots.drop()
        if self.ragged is not None:
            self.slots.drop()

    # ---- what transformers asks

    @property
    def is_sliding(self) -> bool:
        return self.window is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        form = make_form(self.policy.codec, self.index, key_states, value_states)
        self._begin(form, *key_states.shape[:2])

    def begin_as(self, layer: SlotLayer, batch: int) -> None:
        """Make empty slots like those of another layer, of one KV head."""
        self._begin(layer.slots.form, batch, 1)

    def _begin(self, form: Form, batch: int, kv_heads: int) -> None:
        names = self.policy.statistics
        self.slots = SlotBuffers(form, batch, kv_heads, names, self.sizing)
        self.is_initialized = True
        for part in self.parts.values():
            part.begin(batch, kv_heads, self.slots.device)

    def get_seq_length(self) -> int | Tensor:
        return self.seen if self.seen_device is None else self.seen_device.view(()) - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that attention will see, and how many tokens lie before them."""
        if self.seen_device is not None:
            return self.slots.used, 0  # of no interest to the mask of a decoded token
        kept = self.slots.kept if self.is_initialized else 0
        return kept + query_length, self.seen - kept

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, rounded: bool = False, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Take in the keys and values of a block; they are stored when it has been attended.

        Args:
            rounded: whether its tokens see each other as they are stored.

        Returns:
            Keys and values to attend to: of the kept slots, and the block behind them; of heads
            that are read apart the block alone.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.unattended = True
        if rounded:
            form = self.form
            key_states, value_states = form.dequantise(form.quantise(key_states, value_states))
        if self.reads_apart:
            return key_states, value_states
        self.compact()
        return self.slots.joined(key_states, value_states)

    def write_token(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write a decoded token, (batch, kv_heads, 1, dim), at once.

        Returns:
            Keys and values, or codes, of the slots in use; of ragged heads the token alone.
        """
        self.unattended = True
        if self.ragged is not None:
            return key, value
        if self.seen_device is not None and self.parts.kernel and self._kernel_writes:
            self.unattended = Unwritten(key, value)
        else:
            self.slots.write(key, value, static=self.seen_device is not None)
        return self.slots.attended(as_codes=self.attends_codes)

    @property
    def _kernel_writes(self) -> bool:
        """Whether the kernel that attends a decoded token may write it.

        Nothing else may see it before, and of numbers beside slots it knows columns of attention.
        """
        early = self.parts.attends is not None or self.parts.at["place"] or self.policy.sees_hidden
        return (
            self.form.codec is None and not early and {*self.slots.state} == {*self.policy.columns}
        )

    def take_unwritten(self) -> Unwritten | None:
        """Take the token that is still to be written; None: there is none."""
        new, self.unattended = self.unattended, False
        return new if isinstance(new, Unwritten) else None

    def write_unwritten(self) -> None:
        """Write the token that a kernel was to write, where none attends it."""
        new = self.take_unwritten()
        if new is not None and new.place is not None:
            self.slots.write(new.key, new.value, static=True)
            self.slots.place(new.place, static=True)

    @property
    def is_croppable(self) -> bool:
        """Whether the last token can be taken back; transformers 5.24 asks before it tries."""
        return self.why_no_crop() is None

    def get_max_length(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.reindex(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reindex(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reindex(lambda t: t[indices.to(t.device)])

    def reset(self) -> None:
        self._clear(self.sizing.meter)
        for part in self.parts.values():
            part.clear()

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        """Let everything follow the batch entries, by what is done to a tensor of theirs."""
        if not self.is_initialized:
            return
        ragged = self.ragged
        if ragged is not None:
            self.compact()
        self.slots.reindex(change)
        self.reindex_counts(change)
        self.budget = self.budget.reindexed(change)
        for part in self.parts.values():
            part.reindex(change)
        if ragged is not None:
            ragged.split_again(self)

    # ---- what is stored

    @property
    def stores(self) -> list[SlotLayer]:
        """The layers that hold the slots: itself, or the buckets of its heads."""
        return [self] if self.ragged is None else self.ragged.buckets

    @property
    def keys(self) -> Tensor | None:
        """Keys, or codes, of all slots; None before the first token."""
        return self.slots.keys if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:
        return self.slots.values if self.is_initialized else None

    @property
    def batch_size(self) -> int:
        return self.slots.batch if self.is_initialized else -1

    @property
    def evicts_tokens(self) -> bool:
        """Whether the layer holds its budget after every token by a choice of its own."""
        policy = self.policy
        return policy.when == "always" and policy.ranking.layer_tokens != "same"

    @property
    def appends(self) -> bool:
        """Whether decoded tokens are added and never take another's place."""
        return self.policy.when != "always"

    @property
    def grows(self) -> bool:
        """Whether the layer holds a budget that the next token does not fill yet."""
        return not self.appends and self.slots.reuse_slot is None

    @property
    def padded(self) -> bool:
        """Whether batch entries differ in length: short ones have empty slots among the used."""
        return self.lengths is not None

    @property
    def masked(self) -> bool:
        """Whether some of the used slots may be empty."""
        return self.lengths is not None or self.slots.reserved is not None

    def stored_positions(self) -> Tensor:
        """Positions of the used slots, those to reuse as empty: (batch, kv_heads, used) int32."""
        return (self.slots if self.ragged is None else self.ragged).stored_positions()

    @property
    def form(self) -> Form:
        """How keys and values of all heads lie in slots."""
        form = self.slots.form
        return form if self.ragged is None else self.ragged.whole_form(form)

    def sorted_slots(self) -> Slots:
        """Copies of what the kept slots hold, in ascending position, empty ones last."""
        return (self.slots if self.ragged is None else self.ragged).sorted_slots()

    # ---- how tokens enter and leave

    def add_part(self, part: Part) -> None:
        """Keep one more thing beside the slots."""
        self.parts = Parts([*self.parts.values(), part])
        if self.is_initialized:
            part.begin(self.batch_size, self.slots.kv_heads, self.slots.device)

    def set_budget(self, budget: LayerBudget) -> None:
        """Fix what each batch entry may keep."""
        self.budget = budget
        self._set_growth(replace(self.sizing.growth, max_budget=budget.max_budget))

    def grow_exactly(self, exact: bool) -> None:
        """Say whether buffers are never larger than what they hold."""
        self._set_growth(replace(self.sizing.growth, exact=exact))

    def expect(self, tokens: int) -> None:
        """Say how many tokens will be decoded, and give back the memory that is not for them."""
        for store in self.stores:
            used = store.slots.used
            store._set_growth(replace(store.sizing.growth, expected=used + tokens))
            store.slots.trim(full=not store.appends and used >= store.budget.min_budget)

    def _set_growth(self, growth: Growth) -> None:
        self.sizing = replace(self.sizing, growth=growth)
        if self.is_initialized:
            self.slots.set_growth(growth)

    @property
    def expected(self) -> int:
        """Decoded tokens that are still to come, as far as is known."""
        slots = self.stores[0].slots
        return max(0, slots.sizing.growth.expected - slots.used)

    def enter_block(self, tokens: int, valid: Tensor | None = None) -> None:
        """Count a block that is being attended; see `TokenCounts.count_block`."""
        self.unattended = False
        self.count_block(tokens, valid)

    def enter_token(self, positions: Tensor | None) -> None:
        """Count and place the token that has just been written.

        Args:
            positions: (batch, 1), -1 where a batch entry has padding instead; None: none has.
        """
        new, self.unattended = self.unattended, False
        slots = self.slots
        self.pairs_read = slots.used
        if slots.grouped and self.lengths is None:  # the group has placed the token already
            self.seen += 1
            return
        position = self.count_token(positions)
        if isinstance(new, Unwritten):
            assert isinstance(position, Tensor), "a static step counts on the device"
            self.unattended = new._replace(place=position)
        elif self.ragged is None and not slots.grouped:
            slots.place(position, static=self.seen_device is not None)

    def take_back_token(self) -> None:
        """Forget a token whose step was recorded in part, and not run."""
        self.unattended = False
        self.slots.end_token()

    def why_no_crop(self) -> str | None:
        """Say why the last tokens cannot be taken back; None: they can."""
        if not self.is_initialized:
            return None
        if self.window is not None:
            why = "its sliding windows have let tokens go that would be back in them"
            return why if self.slots.kept < self.seen else None
        if not self.policy.attends_all:
            reader = self.policy.reader
            if reader is not None and self.policy.stores_all:
                return f"`{reader.name}` has tables of what it read, which do not go back"
            return "what was evicted is gone"
        if self.parts:
            return "it records what it keeps"
        if self.padded and not (self.slots.as_read and self.slots.ordered):
            return "the padding of its batch is not where it was"
        return None

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back, in a layer of which the cache has asked `why_no_crop`."""
        tokens = abs(tokens_to_remove)
        if not self.is_initialized:
            return
        self.compact()
        gone = self.slots.cut_off(tokens)
        lengths = None
        if self.lengths is not None:
            lengths = self.lengths - (gone[:, 0] >= 0).sum(1)
        self.count_from(self.seen - tokens, lengths)
        self.unattended = False

    def read(self, pairs: float) -> None:
        """Note how many keys and values a decoded token has read, per KV head."""
        self.pairs_read = pairs

    def compact(self) -> None:
        """Put the kept slots of all heads side by side, in ascending position, at the front."""
        if self.ragged is not None:
            slots, buckets = self.ragged.sorted_slots(), self.ragged.buckets
            self.slots.set_form(self.ragged.whole_form(self.slots.form))
            self.ragged = None
            for bucket in buckets:
                bucket.slots.drop()
            self.slots.replace(slots)
        else:
            self.slots.compact()

    @property
    def reads_apart(self) -> bool:
        """Whether a block goes to the buckets as they are: a prompt is read that is cut again."""
        return self.ragged is not None and self.sizing.growth.exact and self.slots.kv_heads > 1

    def hold_ragged(self, ragged: Ragged) -> None:
        """Keep the tokens in buckets of heads, in place of the layer's own slots."""
        for bucket in [] if self.ragged is None else self.ragged.buckets:
            bucket.slots.drop()
        self.slots.clear()
        self.slots.set_form(self.slots.form.reindexed(lambda tensor: tensor[:0]))
        self.ragged = ragged


class ChunkedSlotLayer(SlotLayer):
    """A slot layer whose window is a chunk: chunks of that many tokens are side by side."""

    chunked = True


class HybridSlotLayer(LinearAttentionLayer, SlotLayer):
    """A slot layer that is transformers' layer of a recurrence, too."""

    is_compileable = False
    is_croppable = False

    def __init__(
        self,
        index: int,
        policy: Policy,
        window: int | None,
        parts: Iterable[Part],
        meter: ByteMeter,
        number_of_states: int = 1,
        *,
        shown: bool = False,
    ) -> None:
        SlotLayer.__init__(self, index, policy, window, parts, meter, shown=shown)
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

    def why_no_crop(self) -> str | None:
        return "its recurrence does not go back"

    def crop(self, tokens_to_remove: int) -> None:
        SlotLayer.crop(self, tokens_to_remove)

    def get_max_length(self) -> int:
        return -1
