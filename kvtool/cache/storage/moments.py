"""The moments of the queries that a layer has read, for a score that looks ahead by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kvtool.cache.storage.part import Part, tensor_bytes
from kvtool.maths.moments import add_moments
from kvtool.maths.rope import Rotation
from kvtool.policies.numbers import State
from kvtool.policies.query_moments import MomentsAsked, QueryMoments


class Moments(Part):
    """Count, mean and scatter of a layer's queries before RoPE, of each row and query head.

    Attributes:
        asked: what of them the policy wants.
        rotation: how the layer turns its queries; None: it does not.
        state: `count` (batch, heads), `mean` (batch, heads, head_dim) and, where it is wanted,
            `scatter` (batch, heads, head_dim, head_dim), all float32; empty before the first block.
    """

    name = "moments"

    def __init__(self, asked: MomentsAsked, rotation: Rotation | None) -> None:
        self.asked, self.rotation = asked, rotation
        self._scale: float = 1.0
        self.clear()

    def clear(self) -> None:
        self.state: State = {}

    def set_scale(self, scale: float) -> None:
        """Say how the running attention scales its logits."""
        self._scale = scale

    def add(self, query: Tensor, valid: Tensor) -> None:
        """Take in queries.

        Args:
            query: (batch, heads, tokens, head_dim) float32, before RoPE.
            valid: bool (batch or 1, tokens), which of them count.
        """
        batch, heads, _, dim = query.shape
        if not self.state:
            self.state = {"count": query.new_zeros(batch, heads)}
            self.state["mean"] = query.new_zeros(batch, heads, dim)
            if self.asked.covariance:
                self.state["scatter"] = query.new_zeros(batch, heads, dim, dim)
        scatter = self.state.get("scatter")
        sums = add_moments(self.state["count"], self.state["mean"], scatter, query, valid)
        names = ("count", "mean", "scatter")
        self.state = {k: t for k, t in zip(names, sums, strict=True) if t is not None}

    def show(self) -> QueryMoments:
        """Return them as a score sees them."""
        if not self.state:
            raise RuntimeError("no block has been attended")
        covariance = None
        if self.asked.covariance:
            covariance = self.state["scatter"] / self.state["count"].clamp(min=1)[..., None, None]
        return QueryMoments(self.state["mean"], covariance, self._scale, self.rotation)

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        self.state = {name: change(number) for name, number in self.state.items()}

    def tensors(self) -> dict[str, Tensor]:
        return {f"moments.{name}": number for name, number in self.state.items()}

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        names = ("count", "mean", "scatter") if self.asked.covariance else ("count", "mean")
        self.state = {name: tensors[f"moments.{name}"] for name in names}

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.state.values())
