"""The layers of a cache: which of a model's can be compressed, and what stands for each."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedConfig

from kvtool.cache.features.calidrop import Calibration
from kvtool.cache.features.cut_schedule import CutSchedule
from kvtool.cache.features.deferred_cut import Deferred
from kvtool.cache.features.head_budgets import HeadBudgets
from kvtool.cache.features.merge_memory import MergeMemory
from kvtool.cache.features.parents import Parents
from kvtool.cache.features.queries import LastQueries, Moments, QueryWindow
from kvtool.cache.features.rope_shift import RopeShift
from kvtool.cache.features.sparse_index import SparseIndex
from kvtool.cache.slots.layer import ChunkedSlotLayer, HybridSlotLayer, SlotLayer
from kvtool.cache.slots.memory import ByteMeter
from kvtool.cache.slots.part import Part
from kvtool.cache.steps.call import IMPLEMENTATION
from kvtool.errors import KvtoolError
from kvtool.maths.rotation import Rotation
from kvtool.model_shape import FREE, SLIDING, stores_latents
from kvtool.policies.evicted.calidrop import CaliDrop
from kvtool.policies.evicted.eviction import Merging
from kvtool.policies.parts import Evidence
from kvtool.policies.policy import Policy
from kvtool.policies.scores.recency import Recency
from kvtool.transformers_versions import kv_sharing_layers, layer_types, stock_layers


def attention_layers(config: PreTrainedConfig) -> list[int]:
    """Indices of the layers that get slots."""
    return [i for i, (kind, _) in enumerate(layer_types(config)) if kind in FREE + SLIDING]


def check_layers(config: PreTrainedConfig) -> None:
    """Refuse layers that this cache cannot hold.

    Raises:
        KvtoolError: indexed attention, or another that is not known here; no attention at all.
    """
    kinds = [kind for kind, _ in layer_types(config)]
    known = set(FREE + SLIDING)
    stock = {"linear_attention", "conv", "mamba", "dummy", "recurrent", "moe", "mlp"}
    for kind in kinds:
        if kind not in known | stock:
            raise KvtoolError(
                f"`{config.model_type}` has `{kind}` layers, whose cache cannot be compressed here"
            )
    if not known & set(kinds):
        raise KvtoolError(
            f"`{config.model_type}` has no attention layers, so there is no cache to compress"
        )


def check_shared(config: PreTrainedConfig, policy: Policy) -> None:
    """Refuse a policy that does more than evict, where layers read the keys of another.

    Raises:
        KvtoolError: one that reads a part of the keys, changes what is kept, or keeps different
            counts in the heads of a layer.
    """
    if not kv_sharing_layers(config):
        return
    asked = {
        "reads a part of the keys": policy.reader,
        "changes or sets aside what is evicted": policy.on_evict,
        "keeps different counts in the heads of a layer": policy.head_split,
        "places tokens anew": policy.score.positions == "cache" or None,
    }
    for what, part in asked.items():
        if part is not None:
            raise KvtoolError(
                f"policy `{policy}` {what}, which layers of `{config.model_type}` that read "
                "the keys of another layer cannot follow",
                hint="take a policy that evicts only, such as h2o or snapkv",
            )


def make_layers(
    config: PreTrainedConfig,
    policy: Policy,
    meter: ByteMeter,
    *,
    exact: bool = False,
    rotations: Sequence[Rotation | None] = (),
) -> list:
    """Make a slot layer for each attention layer, and transformers' own for the others.

    Args:
        meter: counts the bytes of all.
        exact: whether bytes have been promised, so that no head takes a slot more than it holds.
        rotations: of each attention layer, where something turns keys or queries.
    """
    sliding = Policy(Recency(positions=policy.score.positions), codec=policy.codec)
    shown = stores_latents(config) or config._attn_implementation != IMPLEMENTATION
    layers: list = []
    slot_layers: list[SlotLayer] = []
    free: list[SlotLayer] = []
    for i, (kind, options) in enumerate(layer_types(config)):
        window = options.get("sliding_window")
        own = policy if window is None else sliding
        if kind not in FREE + SLIDING:
            layers += stock_layers(kind, options)
            continue
        parts = _parts(own, i, exact=exact)
        rotation = rotations[len(slot_layers)] if rotations else None
        if own.score.positions == "cache":
            parts.append(RopeShift(rotation))
        if own.moments is not None:
            parts.append(Moments(own.moments, rotation))
        if own.score.layer_tokens == "nested":
            parts.append(Parents(free[0], free[-1]) if free else Parents())
        if kind.startswith("hybrid"):
            states = options.get("number_of_states", 1)
            layer: SlotLayer = HybridSlotLayer(i, own, window, parts, meter, states, shown=shown)
        else:
            made = ChunkedSlotLayer if kind == "chunked_attention" else SlotLayer
            layer = made(i, own, window, parts, meter, shown=shown)
        layers.append(layer)
        slot_layers.append(layer)
        if window is None:
            free.append(layer)
    return layers


def _parts(policy: Policy, index: int, *, exact: bool) -> list[Part]:
    """Make what the features of a policy keep beside the slots of a layer: a line for each."""
    parts: list[Part] = []
    if isinstance(policy.on_evict, CaliDrop):
        parts.append(Calibration(policy.on_evict))
    if isinstance(policy.on_evict, Merging):
        parts.append(MergeMemory(policy.on_evict))
    if policy.reader is not None and index >= policy.reader.skip_layers:
        parts.append(SparseIndex(policy.reader))
    if policy.head_split is not None:
        parts.append(HeadBudgets(policy.head_split, exact=exact))
    if policy.allocator is not None and policy.allocator.metric is not None:
        parts.append(Deferred())
    if policy.two_stages:
        parts.append(LastQueries())
    if policy.cuts is not None:
        parts.append(CutSchedule(policy.spare))
    if policy.ranking.evidence is Evidence.QUERIES:
        parts.append(QueryWindow(policy.ranking.window))
    return parts
