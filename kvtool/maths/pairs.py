"""The pairs of numbers that RoPE rotates together: how long they are.

A rotation leaves the lengths alone. Numbers behind the rotated ones are paired in the same layout.
"""

from __future__ import annotations

from kvtool.lazy_torch import Tensor, torch


def pair_count(dim: int) -> int:
    """Count the pairs of a head; a last number without a partner is one by itself."""
    return (dim + 1) // 2


def pair_lengths(states: Tensor, rotated: int = 0, *, interleaved: bool = False) -> Tensor:
    """Measure every pair of keys or queries.

    Args:
        states: (.., head_dim).
        rotated: pairs that the model rotates, which come first in a head.
        interleaved: whether the numbers of a pair are neighbours; else number i of the rotated
            ones, or of those behind them, is beside number i of their second half.

    Returns:
        (.., pairs) float32, the rotated ones first.
    """
    states = states.float()
    turned, others = states[..., : 2 * rotated], states[..., 2 * rotated :]
    if others.shape[-1] % 2:
        others = torch.nn.functional.pad(others, (0, 1))
    parts = [_lengths(part, interleaved) for part in (turned, others) if part.shape[-1]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _lengths(states: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        left, right = states[..., ::2], states[..., 1::2]
    else:
        left, right = states.chunk(2, -1)
    return (left.square() + right.square()).sqrt()
