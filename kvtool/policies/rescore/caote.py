"""CAOTE and FastCAOTE: rank tokens by how much the attention output moves when one of them leaves.

Goel et al., 2025, https://arxiv.org/abs/2504.14051, equations 8-23.

If token j leaves and the remaining weights are renormalised, the output moves by exactly a_j / (1 - a_j) * |o - v_j|,
with a the weights and o the output. For a base policy with other scores h, a_j is h_j over the sum of all scores of the
cache, protected tokens included; the base policy's protection stays.

Differences from the paper: equation 23 (FastCAOTE) prints the attention weight for a; with a general base score its
normalised form is used, as in CAOTE. A group of query heads is judged by the base policy's one score per KV head.
Where a token holds the whole weight the limit is large and the formula 0 * infinity: such a token is kept.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtool.policies.parts import Rescore, SlotView

_CHUNK = 4096  # slots whose distance is computed at a time


def normalised(scores: Tensor, stored: Tensor) -> Tensor:
    """Scores as shares of their sum over the stored slots.

    Args:
        scores: (batch, kv_heads, slots) float32, at least 0.
        stored: bool (batch, kv_heads, slots), False for empty slots, whose share is 0.

    Returns:
        (batch, kv_heads, slots) float32 with rows that sum to 1; equal shares where every score is 0.
    """
    scores = scores.masked_fill(~stored, 0)
    total = scores.sum(-1, keepdim=True)
    equal = stored / stored.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(total > 0, scores / total, equal)


def output_change(share: Tensor, values: Tensor, centre: Tensor) -> Tensor:
    """How far the output moves when a token leaves: share / (1 - share) * |centre - value|.

    Args:
        share: (batch, kv_heads, slots) float32, rows sum to 1.
        values: (batch, kv_heads, slots, value_dim).
        centre: (batch, kv_heads, 1, value_dim) float32, the output, or its stand-in.

    Returns:
        (batch, kv_heads, slots) float32; infinity where a token holds all but 1e-6 of the row.
    """
    distance = torch.cat(
        [
            torch.linalg.vector_norm(part.float() - centre, dim=-1)
            for part in values.split(_CHUNK, dim=2)
        ],
        dim=-1,
    )
    rest = 1 - share
    return torch.where(rest < 1e-6, torch.inf, share / rest * distance)


def mean_value(weights: Tensor, values: Tensor) -> Tensor:
    """Mean of the values under the weights: (batch, kv_heads, 1, value_dim) float32."""
    centre = 0
    for part, weight in zip(values.split(_CHUNK, dim=2), weights.split(_CHUNK, dim=-1), strict=True):
        centre = centre + torch.matmul(weight.unsqueeze(2), part.float())
    return centre


@dataclass(frozen=True)
class CAOTE(Rescore):
    """Keep the tokens whose loss would move the attention output most."""

    name: ClassVar = "caote"
    paper: ClassVar = "https://arxiv.org/abs/2504.14051"

    def rescore(self, importance: Tensor, view: SlotView) -> Tensor:
        share = normalised(importance, view.positions >= 0)
        return output_change(share, view.values, mean_value(share, view.values))


@dataclass(frozen=True)
class FastCAOTE(Rescore):
    """CAOTE with the plain mean of the cached values in place of the output."""

    name: ClassVar = "fastcaote"
    paper: ClassVar = "https://arxiv.org/abs/2504.14051"

    def rescore(self, importance: Tensor, view: SlotView) -> Tensor:
        stored = view.positions >= 0
        share = normalised(importance, stored)
        equal = stored / stored.sum(-1, keepdim=True).clamp(min=1)
        return output_change(share, view.values, mean_value(equal, view.values))
