"""DuoAttention: a few heads keep everything, the others only sinks and recent tokens.

Xiao et al., 2024, https://arxiv.org/abs/2410.10819. Which heads retrieve is learned; the trained
scores are an input here. The authors' code breaks ties by unseeded noise; here the lower layer and
head stays a retrieval head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SINK, _RECENT = 128, 512  # of streaming heads, where the budget has room for them
_SINK_SHARE = 0.2  # of a budget of 256 tokens and less


@dataclass(frozen=True)
class DuoSplit:
    """What a token budget means for heads.

    Attributes:
        retrieval: share of all heads that keep every token.
        sink, recent: tokens that the other heads keep.
    """

    retrieval: float
    sink: int
    recent: int


def split_budget(budget: int, context: int) -> DuoSplit:
    """Turn a mean number of tokens per head into retrieval heads and what streaming heads keep.

    As RocketKV's authors do it (https://arxiv.org/abs/2502.14051): up to 640 tokens every head
    streams.

    >>> split_budget(256, 32768)
    DuoSplit(retrieval=0.0, sink=51, recent=205)
    """
    streaming = _SINK + _RECENT
    if budget >= context:
        return DuoSplit(1.0, 0, 0)
    if budget > streaming:
        return DuoSplit((budget - streaming) / (context - streaming), _SINK, _RECENT)
    sink = _SINK if budget > 256 else int(budget * _SINK_SHARE)
    return DuoSplit(0.0, sink, budget - sink)


def retrieval_heads(scores: Sequence[Sequence[float]], share: float) -> list[list[bool]]:
    """Mark the heads that keep everything: the highest scores of the whole model.

    Args:
        scores: layers x KV heads, higher = retrieves more.
        share: part of all heads, rounded down; ties go to the lower layer, then the lower head.
    """
    places = [(layer, head) for layer, row in enumerate(scores) for head in range(len(row))]
    places.sort(key=lambda place: -scores[place[0]][place[1]])  # stable: ties keep their order
    chosen = set(places[: math.floor(share * len(places) + 1e-9)])
    return [
        [(layer, head) in chosen for head in range(len(row))] for layer, row in enumerate(scores)
    ]
