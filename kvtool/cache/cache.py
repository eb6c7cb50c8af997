"""The cache that transformers holds: a slot layer per attention layer, budgets and reports."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)

from kvtool.cache import handover
from kvtool.cache.budgets import Budgets
from kvtool.cache.kernels import Call
from kvtool.cache.shards import heads_of_layer, shards_of
from kvtool.cache.slots import HybridSlotLayer, SlotLayer
from kvtool.cache.sparse_step import start_reading
from kvtool.cache.surprisals import Surprisals
from kvtool.cache.together import form_groups
from kvtool.documents.plan import PlanDocument
from kvtool.documents.source import Source, check_kind, read_source
from kvtool.errors import KvtoolError, UsageError
from kvtool.identity import config_hash
from kvtool.policies.allocate.room import HeadSplit
from kvtool.policies.allocate.table import parse_allocator
from kvtool.policies.grammar import parse_policy
from kvtool.policies.heads import ALL_HERE, KVHeads
from kvtool.policies.parts import Evidence
from kvtool.policies.policy import Policy
from kvtool.policies.scores.recency import Recency
from kvtool.sizes import DEFAULT_BLOCK, Budget, parse_prefill


@dataclass(frozen=True)
class CacheReport:
    """What a cache holds, counted from its tensors.

    Attributes:
        tokens_seen: tokens of the longest row, padding excluded.
        kept_per_layer: filled slots of the fullest KV head of each layer; 0 for layers without
            attention.
        kv_bytes: keys and values in filled slots.
        allocated_bytes: the key and value buffers.
        state_bytes: positions, the policy's numbers and a reader's tables; with CaliDrop, too, what
            is held of each query head and what waits on the device to be set aside.
        full_bytes: keys and values that a full cache would hold now.
        peak_bytes: most key and value bytes that existed at a time, running blocks included.
        host_bytes: evicted keys and values in host memory (CaliDrop).
        traffic_bytes: what the last decoded token has read of all layers, rows and heads: keys,
            values and what a reader looked at in order to choose; host memory is not counted.
        traffic_pairs: the same per layer, row and KV head, a pair of key and value as the unit; the
            mean over the layers without a sliding window.
        recompute_frequency: of each layer, the share of decoded tokens and query heads that
            attended to those in host memory anew, None before the first; None without CaliDrop.
    """

    tokens_seen: int
    kept_per_layer: list[int]
    kv_bytes: int
    allocated_bytes: int
    state_bytes: int
    full_bytes: int
    peak_bytes: int
    host_bytes: int = 0
    traffic_bytes: int = 0
    traffic_pairs: float = 0
    recompute_frequency: list[float | None] | None = None


def build_cache(
    model: PreTrainedModel,
    policy: Policy | str,
    budget: Budget | str | int | float | None = None,
    *,
    prefill: str = "full",
    plan: PlanDocument | dict | str | Path | None = None,
    head_ranks: Tensor | None = None,
) -> KVCache:
    """Make an empty cache for a model that runs (or will run) kvtool's attention.

    Args:
        model: a decoder of transformers; `attach` it before use.
        policy: what stays, as a value or a policy string.
        budget: tokens per layer and KV head (int, `4K`), share of the prompt (float, `20%`) or
            bytes of the whole cache (`64MiB`). None only for policies that keep everything. For
            readers (`quest` and its like, `rocketkv`) it is not what is stored but what a decoded
            token reads, in pairs of key and value.
        prefill: `full` runs a prompt at once, `block` or `block:M` in blocks of 128 or M tokens,
            cutting after each. A policy that looks at the prompt to split the budget
            (`+d2o-alloc`, `+ada`), or whose queries vote by its length (`pyramidinfer`), reads it
            at once and cuts at its end; one that goes by the model's logits (`sirllm`) reads it in
            blocks in any case.
        plan: what `kvtool plan-budget` decided, or its file: budgets of the layers, in place of
            `budget` and of the policy's own allocator.
        head_ranks: (attention layers, kv_heads) integers, 0 for the head that most needs the whole
            text, for a policy that ranks heads (duoattention); None: as the policy says.

    Raises:
        UsageError: no budget, or one that the policy's protected tokens fill; a prefill that cannot
            be read; a plan beside a budget, or one of another model; head scores that do not fit.
        KvtoolError: a model whose layers cannot be compressed.
    """
    policy = parse_policy(policy)
    config = model.config.get_text_config(decoder=True)
    check_layers(config)
    plan = None if plan is None else read_plan(plan)
    if plan is not None:
        if budget is not None:
            raise UsageError(f"a plan brings its own budget; leave out {budget}")
        check_plan(plan, model.config)
        check_planned_layers(plan, policy)
        budget = plan.target.budget
        policy = planned_heads(policy, plan)
    request = None if budget is None else Budget.parse(budget)
    if not policy.takes_budget:
        request = None
    elif request is None:
        raise UsageError(f"policy `{policy.name}` needs a budget, such as 512, 20% or 64MiB")
    elif request.tokens is not None:
        policy.check_budget(request.tokens)
    block = parse_prefill(prefill)
    cache = KVCache(config, policy, request, block, kernel_of(model), plan)
    cache.shards = shards_of(model)
    cache.built_for = weakref.ref(model)
    if cache.renumbers:
        from kvtool.cache.rotary import find_rotations  # which knows how models are attached

        rotations = find_rotations(model, [layer.index for layer in cache.slot_layers])
        for layer, rotation in zip(cache.slot_layers, rotations, strict=True):
            layer.rotation = rotation
    split = policy.head_split
    if split is not None and split.ranking:
        from kvtool.cache.head_ranks import rank_model  # which runs a model on a cache of its own

        cache.rank_heads(rank_model(model, split.scores) if head_ranks is None else head_ranks)
    return cache


def read_plan(plan: PlanDocument | dict | str | Path) -> PlanDocument:
    """Return a plan from a document, its data or its file.

    Raises:
        UsageError: it cannot be read, or is no plan.
    """
    if isinstance(plan, PlanDocument):
        return plan
    if isinstance(plan, dict):
        source = Source.parse(json.dumps(plan), "plan")
    else:
        source = read_source(str(plan), option="plan")
    check_kind(source, takes=("plan",), command="this")
    return source.validate(PlanDocument)


def check_plan(plan: PlanDocument, config: PreTrainedConfig) -> None:
    """Refuse a plan that was made for another model.

    Raises:
        UsageError: another configuration.
    """
    if plan.model.config_hash != config_hash(config):
        raise UsageError(
            f"the plan was made for model `{plan.model.id}`, whose configuration is another one",
            hint="make the plan anew: kvtool plan-budget -m MODEL ..",
        )


def planned_heads(policy: Policy, plan: PlanDocument) -> Policy:
    """Return the policy with the plan's split over heads, if it has one and the policy none.

    Raises:
        UsageError: the policy cannot split a budget over heads.
    """
    split = parse_allocator(plan.layers.allocator)
    if not isinstance(split, HeadSplit) or policy.head_split is not None:
        return policy
    keeps_equal = policy.score.when == "never" or policy.reads_budget
    return policy if keeps_equal else replace(policy, heads=split)


def check_planned_layers(plan: PlanDocument, policy: Policy) -> None:
    """Refuse a plan whose layers a policy cannot follow, as it relates their tokens.

    Raises:
        UsageError: unequal budgets for a policy that keeps the same tokens in all layers; budgets
            that grow for one that keeps in each layer part of what it keeps in the layer above.
    """
    tokens = [plan.layers.tokens[i] for i in plan.free_layers]
    hint = "plan with --allocator uniform, or give a budget"
    if policy.score.evidence is Evidence.LOGITS and len(set(tokens)) > 1:
        raise UsageError(
            f"policy `{policy.score.name}` keeps the same tokens in all layers, "
            f"and the plan gives them {min(tokens)} to {max(tokens)}",
            hint=hint,
        )
    if policy.score.nested and tokens != sorted(tokens, reverse=True):
        raise UsageError(
            f"policy `{policy.score.name}` keeps in each layer part of what the layer above keeps, "
            "and the plan gives a layer more than the one above",
            hint=hint,
        )


def kernel_of(model: PreTrainedModel) -> str:
    """The attention implementation that the model was loaded with, which kvtool uses as well."""
    previous = handover.attachment(model)
    return previous.implementation if previous else model.config._attn_implementation


def check_layers(config: PreTrainedConfig) -> None:
    """Refuse layers that this cache cannot hold.

    Raises:
        KvtoolError: shared, chunked or indexed attention; no attention at all.
    """
    kinds, _ = get_layer_types_and_kwargs(config)
    if any(mode == "reuse" for mode in getattr(config, "kv_sharing_modes", None) or ()):
        raise KvtoolError(
            f"`{config.model_type}` lets layers share a cache, which eviction here does not support"
        )
    known = {"full_attention", "sliding_attention", "hybrid", "hybrid_sliding"}
    stock = {"linear_attention", "conv", "mamba", "dummy", "recurrent"}
    for kind in kinds:
        if kind not in known | stock:
            raise KvtoolError(
                f"`{config.model_type}` has `{kind}` layers, whose cache cannot be compressed here"
            )
    if not known & set(kinds):
        raise KvtoolError(
            f"`{config.model_type}` has no attention layers, so there is no cache to compress"
        )


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
        self.peak_bytes = 0
        self.input_ids: Tensor | None = None  # the text so far, where kvtool drove it or loaded it
        self.next_logits: Tensor | None = None  # after the text, where all of it has been fed
        self._prompt_lengths: list[int] | None = None
        self._in_prompt = False
        self.last_block = True  # whether the running forward ends its prompt
        super().__init__(layers=_make_layers(config, policy))
        self.slot_layers = [layer for layer in self.layers if isinstance(layer, SlotLayer)]
        self._grouped = False
        self.surprisals: Surprisals | None = None  # of a policy that goes by the model's logits
        free = any(layer.window is None for layer in self.slot_layers)
        if policy.score.evidence is Evidence.LOGITS and free:
            self.surprisals = Surprisals(self.slot_layers, policy.score)
        self.logits_asked: int | Tensor = 0  # `logits_to_keep` of the running forward
        if policy.score.nested:
            nest = [layer for layer in self.slot_layers if layer.window is None]
            for i, layer in enumerate(nest):
                layer.nest = nest[:i]
        self.plan = plan
        self.budgets = Budgets(self.slot_layers, policy, budget, plan)
        split = policy.head_split
        whole = split is not None and split.whole_prompt and plan is None
        if self.budgets.wait or whole or policy.score.nested:
            self.block = None

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
        if self.renumbers and (self.fed is None or self.fed.seen != layer.seen):
            raise KvtoolError(
                f"`{self.policy}` numbers tokens by their place in the cache, "
                "and this forward has not asked for it",
                hint="call kvtool.attach(model) first, and pass the cache as past_key_values=cache",
            )
        decoding = self.decodes(layer, key_states.shape[2])
        if not decoding:
            self._ungroup()
        else:
            self.start_reading(layer)
        if decoding and not self._grouped and layer is self.first_layer:
            self._grouped = form_groups(self.slot_layers)
        raw_key, raw_value = layer.update(key_states, value_states, decoding=decoding)
        if not decoding:
            block = (raw_key.numel() * raw_key.element_size()) + (
                raw_value.numel() * raw_value.element_size()
            )
            self.peak_bytes = max(self.peak_bytes, self._allocated_bytes() + block)
        handover.give(
            handover.Taken(self, layer, raw_key, raw_value, key_states, value_states, decoding)
        )
        return raw_key, raw_value

    def start_reading(self, layer: SlotLayer) -> None:
        """Make a reader's tables for a layer that has none yet since the last prompt."""
        if layer.is_initialized and layer.reader is not None and layer.reading is None:
            start_reading(layer, self.budgets.reads)

    def decodes(self, layer: SlotLayer, q_len: int) -> bool:
        """Whether so many new tokens are one decoded token, and not a block of a prompt."""
        return q_len == 1 and layer.seen > 0 and not self._in_prompt

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
            for layer in self.slot_layers:
                layer.group = None
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

    def reset(self) -> None:
        self._ungroup()
        if self.surprisals is not None:
            self.surprisals.reset()
        self.input_ids = self.next_logits = self.fed = None
        self.budgets.reset()
        super().reset()
        self.peak_bytes = 0

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
        """
        if self.budgets.reads is not None:
            self.budgets.reads.reserve = new_tokens
        if lengths is not None:
            self.budgets.check(lengths)
        self._in_prompt, self._prompt_lengths = True, lengths
        if self.surprisals is not None:
            self.surprisals.begin_turn()
        try:
            yield
            if self.budgets.held_back:
                self.budgets.cut_held_back(self.tokens_seen())
            for layer in self.slot_layers:
                self.start_reading(layer)
        finally:
            self._in_prompt, self._prompt_lengths, self.last_block = False, None, True

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
        whole = self.surprisals is not None or self.policy.score.once
        return None if whole else self.block

    def set_heads(self, layer: SlotLayer, query_heads: int) -> None:
        """Tell a layer which part of its heads it holds, before a block of a prompt is cut.

        Raises:
            KvtoolError: what is cached is not split like the query heads.
        """
        if self.shards.processes > 1:
            kv_heads = layer.positions.shape[1]
            layer.heads = heads_of_layer(self.shards, self.config, query_heads, kv_heads)
            if layer.calibration is not None:
                layer.calibration.heads = layer.heads

    def set_budget(self, layer: SlotLayer, positions: Tensor | None, q_len: int) -> None:
        """Fix what the rows of a layer may keep, before a block of a prompt is cut."""
        self.budgets.set(layer, positions, q_len, self._prompt_lengths)

    def layer_done(self, layer: SlotLayer) -> None:
        """Cut what was held back, if this was the last layer of a prompt that came at once."""
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
        if not self._grouped:
            self._grouped = form_groups(self.slot_layers)
        for layer in self.slot_layers:
            if layer.appends and layer.room_until <= layer.seen:
                layer.hold_room(tokens)
        return True

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
        """Count what is held, from the tensors.

        Args:
            of_all_processes: under tensor parallelism, add up what each process holds; all of them
                must then ask. Where a family leaves attention whole in each process, every copy
                counts.
        """
        seen = self.tokens_seen()
        slots = self.slot_layers
        kept = [
            self.kept_positions(i).shape[-1]
            if isinstance(layer, SlotLayer) and layer.is_initialized
            else 0
            for i, layer in enumerate(self.layers)
        ]
        full = 0
        for layer in slots:
            if layer.is_initialized:
                tokens = sum(n if layer.window is None else min(n, layer.window - 1) for n in seen)
                full += tokens * layer.positions.shape[1] * layer.token_bytes()
        allocated = self._allocated_bytes()
        aside = [getattr(layer, "calibration", None) for layer in self.layers]
        sizes = [
            sum(layer.filled_bytes() for layer in slots),
            allocated,
            sum(layer.state_bytes() for layer in slots)
            + (0 if self.surprisals is None else self.surprisals.bytes),
            full,
            max(self.peak_bytes, allocated),
            sum(part.store.host_bytes for part in aside if part is not None),
            round(sum(layer.bytes_read() for layer in slots)),
        ]
        if of_all_processes and self.shards.processes > 1:
            device = self.first_layer.device
            sizes = self.shards.total(torch.tensor(sizes, device=device)).tolist()
            kept = self.shards.most(torch.tensor(kept, device=device)).tolist()
        read = [layer.pairs_read for layer in slots if layer.window is None]
        read = read or [layer.pairs_read for layer in slots]
        frequency = [None if part is None else part.recompute_frequency for part in aside]
        return CacheReport(
            max(seen), kept, *sizes, sum(read) / len(read), frequency if any(aside) else None
        )

    def _allocated_bytes(self) -> int:
        return sum(layer.allocated_bytes() for layer in self.slot_layers)

    def _slot_layer(self, index: int) -> SlotLayer:
        layer = self.layers[index]
        if isinstance(layer, SlotLayer):
            return layer
        if index == 0:  # transformers asks layer 0 for the first attention layer
            return self.first_layer
        raise KvtoolError(f"layer {index} has no attention, so it holds no keys")


def _make_layers(config: PreTrainedConfig, policy: Policy) -> list:
    sliding = Policy(Recency(positions=policy.score.positions))
    layers = []
    for i, (kind, options) in enumerate(zip(*get_layer_types_and_kwargs(config), strict=True)):
        window = options.get("sliding_window")
        own = policy if window is None else sliding
        if kind in ("full_attention", "sliding_attention"):
            layers.append(SlotLayer(i, own, window))
        elif kind in ("hybrid", "hybrid_sliding"):
            layers.append(HybridSlotLayer(i, own, window, options.get("number_of_states", 1)))
        else:
            layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**options))
    return layers
