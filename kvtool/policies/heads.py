"""The KV heads of a layer, of which one process may hold a part (tensor parallelism).

Whatever a policy decides across the heads of a layer goes through here: then all processes decide
alike, and as one process that holds all heads would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

from kvtool.model_shape import LayerShape

HeadSizes = LayerShape
"""Sizes of a layer's heads: how many store and ask, numbers of a key and of a value."""


class KVHeads:
    """The heads of a layer, all of them held here."""

    processes = 1  # that hold a part each

    def first(self, held: int) -> int:
        """Return the place among all heads of the first one held here.

        Args:
            held: heads held here.
        """
        return 0

    def mean(self, numbers: Tensor) -> Tensor:
        """Average over all heads, (batch, kv_heads, ..) to (batch, ..)."""
        return numbers.mean(1)

    def total(self, numbers: Tensor) -> Tensor:
        """Sum over the processes of what each has counted."""
        return numbers

    def most(self, numbers: Tensor) -> Tensor:
        """Return the largest of what each process has counted."""
        return numbers

    def all(self, slots: Tensor, empty: float) -> Tensor:
        """Bring together what belongs to all heads: (batch, kv_heads, slots) of those held here.

        Args:
            empty: stands where another process has fewer slots.
        """
        return slots

    def own(self, numbers: Tensor) -> Tensor:
        """Return the part of (batch, all heads, ..) that belongs to the heads held here."""
        return numbers


ALL_HERE = KVHeads()


def all_here() -> KVHeads:
    """Return `ALL_HERE`: the default of a view, where torch 2.11's compiler traces no object."""
    return ALL_HERE
