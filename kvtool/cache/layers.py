"""The layers of a cache: which of a model's can be compressed, and what stands for each."""

from __future__ import annotations

from transformers import PreTrainedConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

from kvtool.cache.slots import HybridSlotLayer, SlotLayer
from kvtool.errors import KvtoolError
from kvtool.policies.policy import Policy
from kvtool.policies.scores.recency import Recency
from kvtool.transformers_versions import layer_types, shares_caches


def check_layers(config: PreTrainedConfig) -> None:
    """Refuse layers that this cache cannot hold.

    Raises:
        KvtoolError: shared, chunked or indexed attention; no attention at all.
    """
    kinds = [kind for kind, _ in layer_types(config)]
    if shares_caches(config):
        raise KvtoolError(
            f"`{config.model_type}` lets layers share a cache, which eviction here does not support"
        )
    known = {"full_attention", "sliding_attention", "hybrid", "hybrid_sliding"}
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


def make_layers(config: PreTrainedConfig, policy: Policy) -> list:
    """Make a slot layer for each attention layer, and transformers' own for the others."""
    sliding = Policy(Recency(positions=policy.score.positions))
    layers = []
    for i, (kind, options) in enumerate(layer_types(config)):
        window = options.get("sliding_window")
        own = policy if window is None else sliding
        if kind in ("full_attention", "sliding_attention"):
            layers.append(SlotLayer(i, own, window))
        elif kind in ("hybrid", "hybrid_sliding"):
            layers.append(HybridSlotLayer(i, own, window, options.get("number_of_states", 1)))
        else:
            layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**options))
    return layers
