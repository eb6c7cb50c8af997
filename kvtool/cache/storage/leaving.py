"""The tokens that leave layers for a decoded one: folded in for all layers at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtool.cache.storage.calibration import Calibration
from kvtool.cache.storage.evicted_attention import join_token


@torch.no_grad()
def offload_evicted(
    layers: Sequence[Calibration],
    pairs: Sequence[tuple[Tensor, Tensor]],
    positions: Tensor,
    whole: bool,
) -> None:
    """Store the token that leaves each of some layers, and fold it into what that layer holds.

    Layers that are alike are folded at once, one behind the other.

    Args:
        pairs: the key and value of each layer, (batch, kv_heads, 1, dim).
        positions: (layers * batch, kv_heads, 1) of these tokens, -1 = none leaves.
        whole: whether no position is -1.
    """
    batch = len(pairs[0][0])
    places = positions.split(batch)
    if len({(each.how, *(tensor.shape for tensor in each.held)) for each in layers}) > 1:
        for layer, pair, place in zip(layers, pairs, places, strict=True):
            offload_evicted([layer], [pair], place, whole)
        return
    held = [torch.cat(tensors) for tensors in zip(*(each.held for each in layers), strict=True)]
    key, value = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    stored = None if whole else positions >= 0
    query, out, lse = held
    joined = join_token(query, out, lse, key, value, stored, *layers[0].how)
    outs, sums = (tensor.split(batch) for tensor in joined)
    for layer, pair, place, own, total in zip(layers, pairs, places, outs, sums, strict=True):
        layer.take_in((*pair, place), own, total, whole)
