"""Numbers of a layer: counts by batch entry and head, statistics by slot, and its KV heads.

One process may hold a part of the KV heads (tensor parallelism). Whatever a policy decides across
the heads of a layer uses the heads of this file. Then all processes decide alike, and as one
process that holds all heads would.
"""

from __future__ import annotations

from typing import TypeVar, Union

from kvtool.lazy_torch import Tensor, torch
from kvtool.model_shape import LayerShape

State = dict[str, "Tensor"]  # numbers beside the slots, by name: (batch, kv_heads, slots) float32
Count = Union[
    int, "Tensor"
]  # one number, or one per sequence (batch, 1, 1), or per head (batch, kv_heads, 1)
PROMPT = "prompt"  # beside a slot where the prompt stays: 1 for its tokens
SHIFT = "turn"  # beside a slot where `positions=cache`: its place minus its key's rotation


AnyCount = TypeVar("AnyCount", int, Count)  # a function of one number gives one


def minimum(a: AnyCount, b: AnyCount) -> AnyCount:
    """Return the smaller of two counts, per batch entry if either is."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))


def at_least_zero(count: Count) -> Count:
    """Return a count, or 0 where it is negative."""
    return max(count, 0) if isinstance(count, int) else count.clamp(min=0)


def half(budget: AnyCount) -> AnyCount:
    """Return half of a budget, rounded down: the default recent window of H2O and others."""
    return budget // 2


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
            empty: fills in where another process has fewer slots.
        """
        return slots

    def own(self, numbers: Tensor) -> Tensor:
        """Return the part of (batch, all heads, ..) that belongs to the heads held here."""
        return numbers


ALL_HERE = KVHeads()


def all_here() -> KVHeads:
    """Return `ALL_HERE`: the default of a view, where torch 2.11's compiler traces no object."""
    return ALL_HERE
