"""CAOTE and FastCAOTE: rank tokens by how much the attention output moves when one of them leaves.

Goel et al., 2025, https://arxiv.org/abs/2504.14051, equations 8-23.

If token j leaves and the remaining weights are renormalised, the output moves by exactly a_j / (1 -
a_j) * |o - v_j|, with a the weights and o the output. For a base policy with other scores h, a_j is
h_j over the sum of all scores of the cache, protected tokens included; the base policy's protection
stays.

Differences from the paper: equation 23 (FastCAOTE) prints the attention weight for a; with a
general base score its normalised form is used, as in CAOTE. A group of query heads is judged by the
base policy's one score per KV head. Where a token holds the whole weight the limit is large and the
formula 0 * infinity: such a token is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.lazy_torch import Tensor, torch
from kvtool.policies.parts import Count, Rescore, SlotView

_CHUNK = 8192  # slots whose difference from the centre is held at a time


def normalised(scores: Tensor, held: Count, stored: Tensor | None = None) -> Tensor:
    """Divide scores by their sum over the stored slots.

    Args:
        scores: (batch, kv_heads, slots) float32, at least 0.
        held: how many slots are stored, one number or (batch, 1 or kv_heads, 1).
        stored: bool (batch, kv_heads, slots), False for empty slots, whose share is 0; None: none
            is empty.

    Returns:
        (batch, kv_heads, slots) float32 with rows that sum to 1; equal shares where every score is
        0.
    """
    if stored is not None:
        scores = scores.masked_fill(~stored, 0)
    total = scores.sum(-1, keepdim=True)
    share = torch.where(total > 0, scores / total, 1 / held)
    return share if stored is None else share.masked_fill(~stored, 0)


def output_change(share: Tensor, distance: Tensor) -> Tensor:
    """Measure how far the output moves without a token: share / (1 - share) * |centre - value|.

    Args:
        share: (batch, kv_heads, slots) float32, rows sum to 1.
        distance: (batch, kv_heads, slots) float32, of each value from the output, or from its
            replacement.

    Returns:
        (batch, kv_heads, slots) float32; infinity where a token holds all but 1e-6 of the row.
    """
    rest = 1 - share
    return (share / rest).mul_(distance).masked_fill_(rest < 1e-6, float("inf"))


def distance_from_mean(weights: Tensor, values: Tensor) -> Tensor:
    """Measure how far each value lies from the mean of the values under the weights.

    Args:
        weights: (batch, kv_heads, slots) float32, rows sum to 1.
        values: (batch, kv_heads, slots, value_dim).

    Returns:
        (batch, kv_heads, slots) float32, Euclidean.
    """
    values = values.float()
    mean = torch.matmul(weights.unsqueeze(2), values)
    if values.shape[2] <= _CHUNK:
        return torch.linalg.vector_norm(values - mean, dim=-1)
    parts = [torch.linalg.vector_norm(part - mean, dim=-1) for part in values.split(_CHUNK, 2)]
    return torch.cat(parts, -1)


def _distances(weights: Tensor, view: SlotView) -> Tensor:
    layers = zip(weights.chunk(len(view.values)), view.values, strict=True)
    parts = [distance_from_mean(weight, values) for weight, values in layers]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class CAOTE(Rescore):
    """Keep the tokens whose loss would move the attention output most."""

    name: ClassVar = "caote"
    paper: ClassVar = "https://arxiv.org/abs/2504.14051"

    def rescore(self, importance: Tensor, view: SlotView) -> Tensor:
        share = normalised(importance, view.held, view.stored)
        return output_change(share, _distances(share, view))


@dataclass(frozen=True)
class FastCAOTE(Rescore):
    """CAOTE with the plain mean of the cached values in place of the output."""

    name: ClassVar = "fastcaote"
    paper: ClassVar = "https://arxiv.org/abs/2504.14051"

    def rescore(self, importance: Tensor, view: SlotView) -> Tensor:
        share = normalised(importance, view.held, view.stored)
        equal = normalised(torch.zeros_like(importance), view.held, view.stored)
        return output_change(share, _distances(equal, view))
