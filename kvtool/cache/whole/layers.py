"""The layers of a cache: which layers of a model can be compressed, and the object for each."""

from __future__ import annotations

from transformers import PreTrainedConfig

from kvtool.cache.features.table import features_of, make_parts
from kvtool.cache.slots.layer import ChunkedSlotLayer, HybridSlotLayer, SlotLayer
from kvtool.cache.slots.part import LayerSite, refusal
from kvtool.cache.slots.sizing import ByteMeter
from kvtool.cache.steps.call import IMPLEMENTATION
from kvtool.cache.whole.settings import ModelLink
from kvtool.errors import KvtoolError
from kvtool.model_shape import FREE, SLIDING, stores_latents
from kvtool.policies.policy import Policy
from kvtool.policies.scores.recency import Recency
from kvtool.transformers_versions import kv_sharing_layers, layer_types, stock_layers


def attention_layers(config: PreTrainedConfig) -> list[int]:
    """Indices of the layers that get slots."""
    return [i for i, (kind, _) in enumerate(layer_types(config)) if kind in FREE + SLIDING]


def check_layers(config: PreTrainedConfig) -> None:
    """Refuse layers that this cache cannot hold, and a model without attention (KvtoolError)."""
    kinds = [kind for kind, _ in layer_types(config)]
    known = set(FREE + SLIDING)
    stock = {"linear_attention", "conv", "mamba", "dummy", "recurrent", "moe", "mlp"}
    odd = [kind for kind in kinds if kind not in known | stock]
    if odd or not known & set(kinds):
        why = "no attention layers, so there is no cache to compress"
        if odd:
            why = f"`{odd[0]}` layers, whose cache cannot be compressed here"
        raise KvtoolError(f"`{config.model_type}` has {why}")


def why_not(policy: Policy, what: str, model: str = "") -> str | None:
    """Say why a policy's features refuse something; None: they do not. See `refusal`."""
    return refusal(features_of(policy), what, policy, model)


def check_shared(config: PreTrainedConfig, policy: Policy) -> None:
    """Refuse what does more than evict, where layers read the keys of another (KvtoolError)."""
    if not kv_sharing_layers(config):
        return
    why = why_not(policy, "shared")
    if why is not None:
        raise KvtoolError(
            f"policy `{policy}` {why}, which layers of `{config.model_type}` that read "
            "the keys of another layer cannot follow",
            hint="take a policy that evicts only, such as h2o or snapkv",
        )


def make_layers(
    config: PreTrainedConfig,
    policy: Policy,
    meter: ByteMeter,
    link: ModelLink,
) -> list:
    """Make a slot layer for each attention layer, and transformers' own for the others.

    Args:
        meter: counts the bytes of all.
    """
    sliding = Policy(Recency(positions=policy.score.positions), codec=policy.codec)
    shown = stores_latents(config) or config._attn_implementation != IMPLEMENTATION
    layers: list = []
    free: list[SlotLayer] = []
    for i, (kind, options) in enumerate(layer_types(config)):
        window = options.get("sliding_window")
        own = policy if window is None else sliding
        if kind not in FREE + SLIDING:
            layers += stock_layers(kind, options)
            continue
        of_model = link.rotations.get(i), link.projections.get(i), tuple(free), link.centres.get(i)
        parts = make_parts(LayerSite(own, i, *of_model))
        if kind.startswith("hybrid"):
            states = options.get("number_of_states", 1)
            layer: SlotLayer = HybridSlotLayer(i, own, window, parts, meter, states, shown=shown)
        else:
            made = ChunkedSlotLayer if kind == "chunked_attention" else SlotLayer
            layer = made(i, own, window, parts, meter, shown=shown)
        layers.append(layer)
        if window is None:
            free.append(layer)
    return layers
