"""The cache that transformers holds: a slot layer per attention layer, prompts and budgets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    LinearAttentionCacheLayerMixin,
)

from kvtool.cache import handover
from kvtool.cache.budgets import Budgets, ModelFacts
from kvtool.cache.kernels import Call
from kvtool.cache.layers import make_layers
from kvtool.cache.report import CacheReport, make_report
from kvtool.cache.shards import heads_of_layer
from kvtool.cache.slots import SlotLayer
from kvtool.cache.sparse_step import start_reading
from kvtool.cache.static import StaticSteps
from kvtool.cache.surprisals import Surprisals
from kvtool.cache.together import form_groups
from kvtool.documents.plan import PlanDocument
from kvtool.errors import KvtoolError
from kvtool.policies.heads import ALL_HERE, KVHeads
from kvtool.policies.parts import Evidence
from kvtool.policies.policy import Policy
from kvtool.sizes import DEFAULT_BLOCK, Budget


class KVCache(Cache):
    """A transformers cache whose attention layers hold at most their budget.

    A user's first forward is taken as the prompt, and so is every later one of more than one token;
    `prompt()` says so where it is not plain (blocks of one token, the length of a prompt that comes
    in blocks).
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        policy: Policy,
        budget: Budget | None,
        block: int | None = None,
        kernel: str = "sdpa",
        plan: PlanDocument | None = None,
    ) -> None:
        self.config, self.policy, self.budget, self.block = config, policy, budget, block
        self.kernel = kernel
        self.shards: KVHeads = ALL_HERE  # how the model's heads are split over processes
        self.built_for: Callable[[], PreTrainedModel | None] = lambda: None
        self.watch: Callable[[handover.Taken, Call, Tensor], None] | None = None  # sees each step
        self.hooked = False  # attention is stock eager code, seen through hooks
        self.head_ranks: Tensor | None = None
        self.hook_note: tuple | None = None  # from the hook before a module to the one after it
        self.renumbers = policy.score.positions == "cache"
        self.fed: handover.Fed | None = None  # where the running forward has placed its tokens
        self.changing = False  # whether a forward has begun to change it and has not ended
        self.peak_bytes = 0
        self.input_ids: Tensor | None = None  # the text so far, where kvtool drove it or loaded it
        self.next_logits: Tensor | None = None  # after the text, where all of it has been fed
        # what the text ends with, where it is a conversation in the words of a chat template
        self.chat: Literal["open", "answer"] | None = None
        self._prompt_lengths: list[int] | None = None
        self._in_prompt = False
        self.last_block = True  # whether the running forward ends its prompt
        super().__init__(layers=make_layers(config, policy))
        self.slot_layers = [layer for layer in self.layers if isinstance(layer, SlotLayer)]
        self.recurrent = any(
            isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.layers
        )
        self._grouped = False
        self._static = StaticSteps()
        self.surprisals: Surprisals | None = None  # of a policy that goes by the model's logits
        free = any(layer.window is None for layer in self.slot_layers)
        if policy.score.evidence is Evidence.LOGITS and free:
            self.surprisals = Surprisals(self.slot_layers, policy.score)
        self.logits_asked: int | Tensor = 0  # `logits_to_keep` of the running forward
        if policy.score.layers == "nested":
            nest = [layer for layer in self.slot_layers if layer.window is None]
            for i, layer in enumerate(nest):
                layer.nest = nest[:i]
        self.plan = plan
        self.budgets = Budgets(
            self.slot_layers,
            policy,
            budget,
            plan,
            ModelFacts(config),
        )
        split = policy.head_split
        whole = split is not None and split.whole_prompt and plan is None
        if self.budgets.wait or whole or policy.score.layers == "nested":
            self.block = None
        for layer in self.slot_layers:
            layer.tight = plan is not None or (budget is not None and budget.bytes is not None)

    # ---- what transformers asks

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[layer_idx]
        if not isinstance(layer, SlotLayer):
            return layer.update(key_states, value_states, *args, **kwargs)
        handover.check_attended(layer)
        if self.surprisals is not None and self.surprisals.arriving is None:
            raise KvtoolError(
                f"policy `{self.policy.score.name}` goes by the logits of the model, "
                "and this forward runs a part of it only",
                hint="call kvtool.attach(model) and then the model itself",
            )
        if self.renumbers and (self.fed is None or not self.fed.follows(layer)):
            raise KvtoolError(
                f"`{self.policy}` numbers tokens by their place in the cache, "
                "and this forward has not asked for it",
                hint="call kvtool.attach(model) first, and pass the cache as past_key_values=cache",
            )
        self.changing = True
        decoding = self.decodes(layer, key_states.shape[2])
        if not decoding:
            self._ungroup()
            self._static.forget()
        else:
            self.start_reading(layer)
        alone = self._grouped or layer.clock is not None
        if decoding and not alone and layer is self.first_layer:
            self._grouped = form_groups(self.slot_layers)
        raw_key, raw_value = layer.update(key_states, value_states, decoding=decoding)
        if not decoding:
            block = (raw_key.numel() * raw_key.element_size()) + (
                raw_value.numel() * raw_value.element_size()
            )
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes() + block)
        handover.give(
            handover.Taken(self, layer, raw_key, raw_value, key_states, value_states, decoding)
        )
        return raw_key, raw_value

    def check_whole(self) -> None:
        """Refuse to go on from a forward that broke off inside.

        Raises:
            KvtoolError: an exception or Ctrl-C ended the last forward, or the last prompt.
        """
        if self.changing:
            raise KvtoolError(
                "the last forward over this cache was interrupted: some of its layers have seen "
                "tokens that others have not",
                hint="start anew with cache.reset(), or feed it inside `with cache.rollback():`",
            )

    def start_reading(self, layer: SlotLayer) -> None:
        """Make a reader's tables for a layer that has none yet since the last prompt."""
        if layer.is_initialized and layer.reader is not None and layer.reading is None:
            start_reading(layer, self.budgets.reads)

    def decodes(self, layer: SlotLayer, q_len: int) -> bool:
        """Whether so many new tokens are one decoded token, and not a block of a prompt."""
        counted = layer.clock is not None or layer.seen > 0
        return q_len == 1 and counted and not self._in_prompt

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if not self.hooked:
            layer = self._slot_layer(layer_idx)
            handover.announce(layer, self.decodes(layer, query_length))
        return super().get_mask_sizes(query_length, layer_idx)

    @property
    def is_linear(self) -> list[bool]:
        return [
            isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, SlotLayer)
            for layer in self.layers
        ]

    def _ungroup(self) -> None:
        """Let every layer decide alone again: their buffers are about to change."""
        if self._grouped:
            for group in {id(each.group): each.group for each in self.slot_layers}.values():
                if group is not None:
                    group.dissolve()
            self._grouped = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._ungroup()
        self._choose_rows(lambda rows: rows[beam_idx.to(rows.device)])
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._ungroup()
        self._choose_rows(lambda rows: rows.repeat_interleave(repeats, 0))
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._ungroup()
        self._choose_rows(lambda rows: rows[indices.to(rows.device)])
        super().batch_select_indices(indices)

    def _choose_rows(self, choose: Callable[[Tensor], Tensor]) -> None:
        self.budgets.choose_rows(choose)
        if self.surprisals is not None:
            self.surprisals.choose_rows(choose)

    def read_in_blocks(self, block: int | None) -> None:
        """Read prompts from here on in blocks of so many tokens, None: whole."""
        self.block = block

    def reset(self) -> None:
        self._ungroup()
        self._static.forget()
        if self.surprisals is not None:
            self.surprisals.reset()
        self.input_ids = self.next_logits = self.fed = self.chat = None
        self.budgets.reset()
        super().reset()
        self.peak_bytes, self.changing = 0, False

    def copy(self) -> KVCache:
        """Return a cache with the same content that goes its own way from here; see `rollback`."""
        return self._copy_but([])

    @contextmanager
    def rollback(self) -> Iterator[None]:
        """Leave the cache as it was: what is fed or generated inside is forgotten at the end.

        So that many questions can be asked of one context. Keys and values are not copied as long
        as new ones only come behind them: `full` copies none, a policy that cuts a prompt none
        while it appends; one that writes over a stored key copies its layer once. May be nested.
        """
        before = self._copy_but([each for layer in self.slot_layers for each in layer.buffers])
        for layer in self.slot_layers:
            layer.lend()
        try:
            yield
        finally:
            self.__dict__ = before.__dict__

    def _copy_but(self, shared: list) -> KVCache:
        """Copy everything deeply except for some values, and for what never changes."""
        self._ungroup()
        shared = [*shared, self.config, self.policy, self.budget, self.plan]
        shared += [layer.rotation for layer in self.slot_layers]
        with torch.inference_mode(False):  # what is made inside it could not be written outside
            return copy.deepcopy(self, {id(value): value for value in shared})

    # ---- what those who drive it tell it

    def remember(self, input_ids: Tensor, next_logits: Tensor | None) -> None:
        """Keep the text so far, and the logits after it where all of it has been fed."""
        self.input_ids, self.next_logits = input_ids, next_logits

    def end_with(self, chat: Literal["open", "answer"] | None) -> None:
        """Note what the text ends with, None where it is no conversation in a template's words."""
        self.chat = chat

    def begin_block(self, *, last: bool) -> None:
        """Say whether the next forward ends its prompt."""
        self.last_block = last

    def break_off(self) -> None:
        """Note that a forward has ended inside, so that nothing goes on from it."""
        self.changing = True

    def watch_steps(self, watch: Callable[[handover.Taken, Call, Tensor], None] | None) -> None:
        """Show every layer's step and its output to a function; None: to nobody."""
        self.watch = watch

    # ---- prompts and budgets

    @contextmanager
    def prompt(self, lengths: list[int] | None = None, new_tokens: int = 0) -> Iterator[None]:
        """Say that the forwards inside are blocks of one prompt; `last_block` says which ends it.

        Args:
            lengths: tokens that each row will have seen at its end; a budget that is a ratio is a
                ratio of these.
            new_tokens: how many will be generated, as far as is known; RocketKV's plan needs it.

        Raises:
            UsageError: a row's share is not above the tokens that the policy always keeps.
            KvtoolError: a forward was interrupted before.
        """
        self.check_whole()
        self.budgets.reserve = new_tokens
        if lengths is not None:
            self.budgets.check(lengths)
        self._in_prompt, self._prompt_lengths = True, lengths
        if self.surprisals is not None:
            self.surprisals.begin_turn()
        before = self.first_layer.seen
        try:
            yield
            if self.budgets.held_back:
                self.budgets.cut_held_back(self.tokens_seen())
            for layer in self.slot_layers:
                self.start_reading(layer)
            self._foresee(new_tokens)
        except BaseException:
            self.changing |= self.first_layer.seen != before  # it is not cut as at a prompt's end
            raise
        finally:
            self._in_prompt, self._prompt_lengths, self.last_block = False, None, True

    def _foresee(self, new_tokens: int) -> None:
        """Let buffers be as large as the tokens to come need, and no larger."""
        if self.plan is not None and new_tokens == 0:
            new_tokens = self.plan.target.max_new_tokens
        for layer in self.slot_layers:
            if layer.is_initialized:
                layer.foresee(new_tokens)
        if self.surprisals is not None:
            self.surprisals.fit()

    def rank_heads(self, ranks: Tensor) -> None:
        """Tell every layer which of its heads most need the whole text.

        Args:
            ranks: (attention layers, kv_heads) integers, 0 for the head that most needs it.
        """
        free = [i for i, layer in enumerate(self.slot_layers) if layer.window is None]
        self.head_ranks = ranks
        among = ranks[free].flatten().argsort().argsort().view(len(free), -1)
        for i, own in zip(free, among, strict=True):
            self.slot_layers[i].head_rank, self.slot_layers[i].heads_ranked = own, among.numel()

    def expect(self, tokens: Tensor, mask: Tensor | None) -> None:
        """Make room for the tokens of the coming forward, for a policy that goes by logits.

        Args:
            tokens: (batch, q_len) int64.
            mask: (batch, past + q_len), 0 = padding; None: no padding.
        """
        self.changing = True
        first, q_len = self.first_layer, tokens.shape[1]
        decoding = self.decodes(first, q_len)
        valid = None
        if mask is not None and (first.ragged or not decoding):
            valid = mask[:, first.seen : first.seen + q_len].bool()
            if not first.ragged and bool(valid.all()):  # the one device sync of a prompt block
                valid = None
        if not decoding:
            if not self._in_prompt:
                self.surprisals.begin_turn()
            self.budgets.foresee(q_len, valid, self._prompt_lengths)
        self.surprisals.make_room(tokens, valid, decoding)

    def block_sizes(self, lengths: list[int]) -> list[int] | None:
        """How many tokens of each row the next forward of a prompt should take; None: all.

        Args:
            lengths: tokens that each row will have seen at the prompt's end.
        """
        if self.surprisals is None:
            return None if self.block is None else [self.block] * len(lengths)
        block = self.block or DEFAULT_BLOCK
        budgets = self.budgets.of_prompt(lengths) or [2 * block] * len(lengths)
        return [min(block, budget // 2 or 1) for budget in budgets]

    @property
    def layer_block(self) -> int | None:
        """How many tokens of a forward a layer takes before it cuts; None: all of them."""
        whole = self.surprisals is not None or self.policy.two_stages
        return None if whole else self.block

    def set_heads(self, layer: SlotLayer, query_heads: int) -> None:
        """Tell a layer which part of its heads it holds, before a block of a prompt is cut.

        Raises:
            KvtoolError: what is cached is not split like the query heads.
        """
        if self.shards.processes > 1:
            kv_heads = layer.positions.shape[1]
            shape = self.budgets.facts.layers[layer.index]
            layer.heads = heads_of_layer(self.shards, self.config, shape, query_heads, kv_heads)
            if layer.calibration is not None:
                layer.calibration.heads = layer.heads

    def set_budget(self, layer: SlotLayer, positions: Tensor | None, q_len: int) -> None:
        """Fix what the rows of a layer may keep, before a block of a prompt is cut."""
        self.budgets.set(layer, positions, q_len, self._prompt_lengths)

    def layer_done(self, layer: SlotLayer) -> None:
        """Cut what was held back, if this was the last layer of a prompt that came at once."""
        if layer is self.slot_layers[-1]:
            self.fed = None
        if layer.held_back and self.budgets.is_last(layer) and not self._in_prompt:
            self.budgets.cut_held_back(self.tokens_seen())

    # ---- fixed shapes

    def fix_shapes(self, tokens: int) -> bool:
        """Make it so that no shape changes with the next decoded token, if that is possible yet.

        Layers that hold their budget must have filled it. Layers that append take room for `tokens`
        tokens at once, and again when it is used up.

        Returns:
            Whether shapes are fixed.
        """
        if self.policy.reader is not None:
            return False  # what is read grows, and the tables with it
        if any(layer.calibration is not None for layer in self.slot_layers):
            return False  # what is set aside grows, and the host decides when it is fetched
        if any(store.grows for layer in self.slot_layers for store in layer.stores):
            return False
        self._ungroup()
        for layer in self.slot_layers:
            if layer.appends and layer.room_until <= layer.seen:
                layer.hold_room(layer.expected or tokens)
        return True

    @contextmanager
    def static_step(self) -> Iterator[None]:
        """Let the forward inside, of one token per row, change nothing but contents of tensors.

        Only while `fix_shapes` says that shapes are fixed.
        """
        with self._static.step(self.slot_layers):
            yield

    # ---- what is in it

    def kept_positions(self, layer: int) -> Tensor:
        """True positions of the tokens that a layer holds.

        Returns:
            (batch, kv_heads, slots) int64, ascending, -1 at the end where a head holds fewer.
        """
        slots = self._slot_layer(layer)
        if not slots.is_initialized:
            raise KvtoolError("the cache is empty: nothing has been fed to it yet")
        positions = slots.stored_positions().long()
        last = torch.iinfo(torch.int64).max
        positions = positions.masked_fill(positions < 0, last).sort(-1).values
        positions = positions.masked_fill(positions == last, -1)
        filled = int((positions >= 0).sum(-1).max()) if positions.numel() else 0
        return positions[..., :filled]

    def tokens_seen(self) -> list[int]:
        """Tokens of each row so far, padding excluded."""
        layer = self.first_layer
        if layer.ragged:
            return layer.lengths.tolist()
        return [layer.seen] * max(layer.batch_size, 1)

    @property
    def first_layer(self) -> SlotLayer:
        """The first attention layer."""
        return self.slot_layers[0]

    def report(self, *, of_all_processes: bool = False) -> CacheReport:
        """Count what is held, from the tensors: see `make_report`."""
        return make_report(self, of_all_processes=of_all_processes)

    def allocated_bytes(self) -> int:
        """Bytes of the key and value buffers of all layers."""
        return sum(layer.allocated_bytes() for layer in self.slot_layers)

    def _slot_layer(self, index: int) -> SlotLayer:
        layer = self.layers[index]
        if isinstance(layer, SlotLayer):
            return layer
        if index == 0:  # transformers asks layer 0 for the first attention layer
            return self.first_layer
        raise KvtoolError(f"layer {index} has no attention, so it holds no keys")
