"""How densely a prompt attends to what a layer holds, while the layer waits to be cut (D2O)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.maths.columns import column_variance
from kvtool.policies.heads import KVHeads
from kvtool.policies.numbers import Count


class Density:
    """Column sums of a prompt's attention; it may come in several forwards.

    Attributes:
        sums: (batch, kv_heads, group, slots) float32, 0 in slots of padding.
        queries: tokens of each row that have been summed.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.queries: Count = 0

    def add(self, sums: Tensor, queries: Count) -> None:
        """Add what the slots have received of a block; its own slots come behind the others."""
        if self.sums is not None:
            sums[..., : self.sums.shape[-1]] += self.sums
        self.sums, self.queries = sums, self.queries + queries

    def measure(self, positions: Tensor, heads: KVHeads) -> Tensor:
        """Measure the variance of the column sums, over the slots that hold a token.

        Args:
            positions: (batch, kv_heads, slots), -1 = empty.

        Returns:
            (batch, 3) float64: the variance, mean over query heads; the queries; the slots that
            hold a token, mean over KV heads.
        """
        stored = positions >= 0
        variance = column_variance(self.sums, stored[:, :, None]).mean(2)
        held = stored.sum(-1).double()
        queries = torch.as_tensor(self.queries, device=held.device).expand(len(held), 1, 1)
        numbers = [heads.mean(variance), queries[:, 0, 0], heads.mean(held)]
        return torch.stack([number.double() for number in numbers], -1)
