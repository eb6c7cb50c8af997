"""The channels of a query that weigh most, and what a dot product over them alone is worth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.maths.selection import top_slots

if TYPE_CHECKING:
    from torch import Tensor

_TINY = 1e-30  # keeps a query of zeros from dividing by zero


def heaviest_channels(query: Tensor, count: int) -> Tensor:
    """Find the `count` channels of largest magnitude, summed over the query heads of a group.

    Args:
        query: (batch, kv_heads, group, head_dim).

    Returns:
        (batch, kv_heads, count) int64.
    """
    return top_slots(query.float().abs().sum(2), count)


def take_channels(query: Tensor, channels: Tensor) -> Tensor:
    """Take some channels of a query: (batch, kv_heads, group, count)."""
    return query.gather(3, channels[:, :, None].expand(-1, -1, query.shape[2], -1))


def partial_scale(query: Tensor, part: Tensor, scale: float) -> Tensor:
    """Compute the factor that makes a logit of a dot product over the heaviest channels alone.

    SparQ (https://arxiv.org/abs/2312.04985): the temperature sqrt(D |q'| / |q|), with the 1-norms
    of the channels taken and of all, in place of sqrt(D).

    Args:
        query: (batch, kv_heads, group, head_dim).
        part: (batch, kv_heads, group, count), the channels taken.
        scale: the factor of whole logits, D ** -0.5 in most models.

    Returns:
        (batch, kv_heads, group, 1) float32.
    """
    import torch

    norm = torch.linalg.vector_norm(part.float(), 1, -1, keepdim=True)
    whole = torch.linalg.vector_norm(query.float(), 1, -1, keepdim=True)
    return scale * torch.sqrt(whole.clamp(min=_TINY) / norm.clamp(min=_TINY))


def take_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Copy rows of a table, each as a whole.

    Args:
        table: (batch, kv_heads, all, width), contiguous.
        rows: (batch, kv_heads, count) int64, or (batch, kv_heads, group, count).

    Returns:
        (batch, kv_heads, count, width), or (batch, kv_heads, group, count, width).
    """
    import torch

    batch, heads, height, width = table.shape
    first = torch.arange(0, batch * heads * height, height, device=table.device)
    first = first.view(batch, heads, *[1] * (rows.dim() - 2))
    flat = table.view(-1, width).index_select(0, (rows + first).flatten())
    return flat.view(*rows.shape, width)


def put_column(table: Tensor, column: Tensor, at: Tensor) -> None:
    """Write a column of each sequence's table, in place; a compiler copies no table for it.

    Args:
        table: (batch, kv_heads, rows, columns).
        column: (batch, kv_heads, rows).
        at: (batch or 1, 1, 1) int64, which column.
    """
    import torch

    entry, head, row = (torch.arange(n, device=table.device) for n in column.shape)
    table.index_put_((entry[:, None, None], head[:, None], row, at), column)
