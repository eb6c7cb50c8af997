"""Counts of one layer, of which batch entries and heads may have their own, and numbers by slot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Union, overload

if TYPE_CHECKING:
    from torch import Tensor

State = dict[str, "Tensor"]  # numbers beside the slots, by name: (batch, kv_heads, slots) float32
Count = Union[
    int, "Tensor"
]  # one number, or one per row (batch, 1, 1), or per head (batch, kv_heads, 1)
PROMPT = "prompt"  # beside a slot where the prompt stays: 1 for its tokens
SHIFT = "turn"  # beside a slot where `positions=cache`: its place, minus where its key stands


@overload
def minimum(a: int, b: int) -> int: ...
@overload
def minimum(a: Count, b: Count) -> Count: ...
def minimum(a: Count, b: Count) -> Count:
    """Return the smaller of two counts, per batch entry if either is."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    import torch

    return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))


def at_least_zero(count: Count) -> Count:
    """Return a count, or 0 where it is negative."""
    return max(count, 0) if isinstance(count, int) else count.clamp(min=0)


@overload
def half(budget: int) -> int: ...
@overload
def half(budget: Count) -> Count: ...
def half(budget: Count) -> Count:
    """Return half of a budget, rounded down: the default recent window of H2O and others."""
    return budget // 2
