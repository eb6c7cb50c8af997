"""What the softmax of a prompt's rows was divided by, for a measurement that sums their weights."""

from __future__ import annotations

from torch import Tensor


class RowNorms:
    """The log-sum-exp of the rows of a block, where the kernel that attended it tells it.

    Attributes:
        lse: (batch, heads, q_len) float32; None: nobody has told.
    """

    def __init__(self) -> None:
        self.lse: Tensor | None = None

    def note(self, lse: Tensor) -> None:
        """Keep the log-sum-exp of the block that has been attended."""
        self.lse = lse
