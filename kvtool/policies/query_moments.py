"""The moments of a text's queries before RoPE: the evidence of a score that looks ahead."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtool.policies.heads import HeadSizes

if TYPE_CHECKING:
    from torch import Tensor

    from kvtool.maths.rope import Rotation
    from kvtool.policies.numbers import Count

_NUMBER = 4  # bytes of a number


@dataclass(frozen=True)
class MomentsAsked:
    """What a score wants of the queries.

    Args:
        sinks: queries of so many first tokens are left out.
        covariance: whether their covariance is wanted beside their mean.
    """

    sinks: int = 0
    covariance: bool = True

    def held_bytes(self, layer: HeadSizes) -> int:
        """Count the bytes of them beside the slots, for one batch entry of a layer."""
        numbers = 1 + layer.key_dim
        if self.covariance:
            numbers += layer.key_dim**2
        return layer.heads * numbers * _NUMBER


@dataclass(frozen=True)
class QueryMoments:
    """The moments of the queries of each query head, before RoPE or as it will turn them.

    Attributes:
        mean: (batch, heads, head_dim) float32.
        covariance: (batch, heads, head_dim, head_dim) float32; None where nobody asked for it.
        scale: what the layer multiplies its logits by.
        rotation: how the layer turns queries and keys; None: it does not.
    """

    mean: Tensor
    covariance: Tensor | None
    scale: float
    rotation: Rotation | None = None

    def ahead(self, start: Count, count: int) -> QueryMoments:
        """Turn them by the mean rotation R of `count` positions in a row: R m and R C R^T.

        Args:
            start: the first of the positions.
        """
        rotation, covariance = self.rotation, self.covariance
        if rotation is None:
            return self
        turns = rotation.mean_rotation(start, count)
        mean = rotation.rotate(self.mean[:, :, None], turns)[:, :, 0]
        if covariance is not None:
            covariance = rotation.rotate(covariance, turns).transpose(2, 3)
            covariance = rotation.rotate(covariance, turns)
        return replace(self, mean=mean, covariance=covariance)
