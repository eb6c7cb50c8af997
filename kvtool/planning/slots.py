"""What a token takes in a slot: its key and value as they are stored, its position and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtool.model_shape import LayerShape

if TYPE_CHECKING:  # a plan needs no torch
    from kvtool.policies.codec.codec import Codec
    from kvtool.policies.policy import Policy

NUMBER = 4
"""Bytes of a position, and of a number of a policy beside a slot."""


def stored_bytes(layer: LayerShape, codec: Codec | None) -> int:
    """Count the bytes of the key and value of one token in a slot of one KV head.

    Args:
        codec: how they are written down; None: in the model's dtype.
    """
    if codec is None:
        return layer.token_bytes
    return codec.vector_bytes(layer.key_dim) + codec.vector_bytes(layer.value_dim)


def range_bytes(layer: LayerShape, codec: Codec | None) -> int:
    """Count the bytes beside the slots of a layer that say where the channels of its keys lie."""
    if codec is None:
        return 0
    from kvtool.policies.codec.codec import RANGE_BYTES

    return layer.kv_heads * layer.key_dim * RANGE_BYTES


def slot_bytes(layer: LayerShape, numbers: int, codec: Codec | None) -> int:
    """Count the bytes of a slot of one KV head: key, value, position and numbers beside."""
    return stored_bytes(layer, codec) + NUMBER * (1 + numbers)


def kv_bytes(
    layers: Sequence[LayerShape | None], tokens: Sequence[int], codec: Codec | None = None
) -> int:
    """Count the bytes of one row's keys and values, so many tokens in each layer."""
    pairs = zip(layers, tokens, strict=True)
    return sum(
        layer.kv_heads * stored_bytes(layer, codec) * count
        for layer, count in pairs
        if layer is not None
    )


def check_dims(policy: Policy | None, layers: Sequence[LayerShape | None]) -> None:
    """Refuse a policy whose codec cannot store the keys or values of a layer.

    Raises:
        UsageError: the first such size.
    """
    if policy is None or policy.codec is None:
        return
    stored = [layer for layer in layers if layer is not None]
    for dim in dict.fromkeys(dim for layer in stored for dim in (layer.key_dim, layer.value_dim)):
        policy.codec.check_dim(dim)
