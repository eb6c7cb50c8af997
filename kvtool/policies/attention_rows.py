"""Attention weights of some queries: the evidence of a score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AttentionRows:
    """Attention weights of some queries of the running block.

    Attributes:
        weights: (batch, kv_heads, group, rows, slots) float32. Rows of padding are 0. A chunk in
            the middle of a prompt stops at its last key: `slots` is then smaller than the view's.
        visible: bool, broadcastable to (batch, kv_heads, rows, slots): the keys that a row could
            see. None: all.
        valid: bool (batch, rows), False where the row is padding; None: no padding.
    """

    weights: Tensor
    visible: Tensor | None = None
    valid: Tensor | None = None

    @property
    def slots(self) -> int:
        """Count the slots that these rows reach."""
        return self.weights.shape[-1]

    def group_mean(self) -> Tensor:
        """Average the weights over the query heads of a group: (batch, kv_heads, rows, slots)."""
        return self.weights.mean(2)

    def summed(self, vote_weights: Tensor) -> AttentionRows:
        """Sum the rows into one, each times its weight, (batch or 1, rows)."""
        weights = self.weights * vote_weights[:, None, None, :, None]
        return AttentionRows(weights.sum(3, keepdim=True))


def asked(rows: AttentionRows | None) -> AttentionRows:
    """Return the rows that `importance` was given; one with LAST_ROWS is always given them."""
    if rows is None:
        raise ValueError("this score has LAST_ROWS as its evidence, and was given none")
    return rows
