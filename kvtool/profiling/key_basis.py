"""The principal components of each KV head's keys, which Loki estimates attention with.

Keys after RoPE, of prompts. https://arxiv.org/abs/2406.02542. The number of a layer is the share of
the variance that the first quarter of the components explains. Near 1, few of them rank tokens as
well as all do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.cache.features.traffic import NAME
from kvtool.maths.estimates import moments, principal_components
from kvtool.profiling.seen import Seen

MOMENTS, VARIANCE = "key_moments", "key_variance"


class KeyMoments:
    """What the components are computed from, of every layer without a sliding window."""

    def __init__(self) -> None:
        self._found: dict[int, Tensor] = {}

    def see(self, seen: Seen) -> None:
        """Sum over the keys of a prompt."""
        if not seen.decoding and not seen.slides:
            self._found[seen.layer] = moments(seen.key)

    def results(self) -> dict[str, dict[int, Tensor]]:
        """Return (kv_heads, head_dim + 1, head_dim)."""
        return {MOMENTS: self._found}


def with_basis(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turn the mean moments of all texts, if they were asked for, into bases and variances."""
    if MOMENTS not in found:
        return found
    found = dict(found)
    means = found.pop(MOMENTS)
    if means.dim() < 4:  # no layer has any
        return found | {NAME: means, VARIANCE: means}
    known = means.isfinite().all((1, 2, 3))
    variances = means.new_full((*means.shape[:2], means.shape[-1]), float("nan"))
    bases = torch.full_like(means[:, :, :-1], float("nan"))
    variances[known], bases[known] = principal_components(means[known])
    return found | {NAME: bases, VARIANCE: variances}


def leading_share(variances: Tensor) -> Tensor:
    """Return the share of variance in the first quarter of the components: (layers, kv_heads)."""
    if variances.dim() < 3:
        return variances
    leading = variances[..., : max(1, variances.shape[-1] // 4)]
    return leading.sum(-1) / variances.sum(-1)
