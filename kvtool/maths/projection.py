"""Projection behind the attention: what it makes of single values, and of their weights."""

from __future__ import annotations

from typing import Literal

from kvtool.lazy_torch import Tensor, torch

_NUMBERS = 1 << 22  # of projected values that are held at a time


def projected_lengths(values: Tensor, weight: Tensor, norm: Literal[1, 2]) -> Tensor:
    """Measure |W_h v| of each value, for every query head h that reads it.

    Args:
        values: (batch, kv_heads, slots, value_dim).
        weight: (out, heads * value_dim), the columns of one head beside those of the next.
        norm: 1 sums absolute values, 2 is Euclidean.

    Returns:
        (batch, kv_heads, group, slots) float32.
    """
    batch, kv_heads, slots, dim = values.shape
    by_head = weight.detach().unflatten(1, (kv_heads, -1, dim))
    group = by_head.shape[2]
    found = torch.empty(batch, kv_heads, group, slots, device=values.device)
    step = max(1, _NUMBERS // (batch * weight.shape[0]))
    with torch.no_grad():
        for head in range(kv_heads):
            for member in range(group):
                columns = by_head[:, head, member].to(values.device).float().T
                for start in range(0, slots, step):
                    own = slice(start, start + step)
                    projected = values[:, head, own].float() @ columns
                    found[:, head, member, own] = torch.linalg.vector_norm(projected, norm, -1)
    return found


def weights_by_output(weights: Tensor, lengths: Tensor, hidden: Tensor) -> Tensor:
    """Multiply weights by the lengths of projected values, relative to those of hidden states.

    Args:
        weights: (batch, kv_heads, group, rows, slots) float32.
        lengths: (batch, kv_heads, group, slots) float32, as of `projected_lengths`.
        hidden: (batch, rows, hidden_size), what has entered the attention of each row.
    """
    own = torch.linalg.vector_norm(hidden.float(), dim=-1).clamp(
        min=torch.finfo(torch.float32).tiny
    )
    return weights * lengths[:, :, :, None] / own[:, None, None, :, None]
