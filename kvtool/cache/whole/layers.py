"""The layers of a cache: which layers of a model can be compressed, and the object for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from transformers import PreTrainedConfig

from kvtool.cache.features.table import features_of, make_parts
from kvtool.cache.slots.layer import ChunkedSlotLayer, HybridSlotLayer, SlotLayer
from kvtool.cache.slots.memory import ByteMeter
from kvtool.cache.slots.part import LayerSite, refusal
from kvtool.cache.steps.call import IMPLEMENTATION
from kvtool.errors import KvtoolError
from kvtool.maths.rotation import Rotation
from kvtool.model_shape import FREE, SLIDING, stores_latents
from kvtool.policies.evidence import QueryCentres
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


def why_not(policy: Policy, what: str, model: str = "") -> str | None:
    """Say why a policy's features refuse something; None: they do not. See `refusal`."""
    return refusal(features_of(policy), what, policy, model)


def check_shared(config: PreTrainedConfig, policy: Policy) -> None:
    """Refuse a policy that does more than evict, where layers read the keys of another.

    Raises:
        KvtoolError: one that reads a part of the keys, changes kept tokens, or keeps different
            counts in the heads of a layer.
    """
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
    rotations: Sequence[Rotation | None] = (),
    centres: Mapping[int, QueryCentres] | None = None,
    projections: Mapping[int, Callable[[], Tensor]] | None = None,
) -> list:
    """Make a slot layer for each attention layer, and transformers' own for the others.

    Args:
        meter: counts the bytes of all.
        rotations: of each attention layer, where something rotates keys or queries.
        centres: of the queries of layers by their index, where a file has them.
        projections: the weight of each layer's output projection, by index, where a policy asks.
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
        rotation = rotations[len(slot_layers)] if rotations else None
        centre = None if centres is None else centres.get(i)
        projection = None if projections is None else projections.get(i)
        site = LayerSite(own, i, rotation, projection, tuple(free), centre)
        parts = make_parts(site)
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
