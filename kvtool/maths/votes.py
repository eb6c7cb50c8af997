"""Votes of the last queries for the tokens before them, smoothed over neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def pool_votes(
    votes: Tensor, positions: Tensor, window: Tensor, *, kernel: int, pool: str
) -> Tensor:
    """Smooth votes over neighbouring tokens, leaving the observation window out.

    Average pooling divides by `kernel` at the borders too, as the authors' code does.

    Args:
        votes: (batch, kv_heads, slots) float32.
        positions: (batch, kv_heads, slots), -1 = empty; neighbours are neighbours by position.
        window: bool (batch, kv_heads, slots), the observation window, the last tokens.
        kernel: odd width, in tokens.
        pool: `max` or `avg`.

    Returns:
        (batch, kv_heads, slots); inside the window the votes as they came.
    """
    import torch

    width = min(kernel, 2 * votes.shape[-1] - 1)  # a wider one sees no more, and takes long
    last = torch.iinfo(positions.dtype).max
    order = positions.masked_fill(positions < 0, last).argsort(-1)
    outside = float("-inf") if pool == "max" else 0.0
    past = votes.masked_fill(window | (positions < 0), outside).gather(-1, order)
    if pool == "max":
        pooled = torch.nn.functional.max_pool1d(past, width, stride=1, padding=width // 2)
    else:
        pooled = torch.nn.functional.avg_pool1d(past, width, stride=1, padding=width // 2)
        pooled = pooled if width == kernel else pooled * (width / kernel)
    pooled = torch.empty_like(pooled).scatter_(-1, order, pooled)
    return torch.where(window, votes, pooled)
