"""The fused attention kernel of a CPU, which returns the log-sum-exp of its rows as well."""

from __future__ import annotations

import torch
from torch import Tensor

_KERNEL = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def can_fuse(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return whether the kernel attends such tensors: on a CPU, of one dtype, without gradients.

    It takes the numbers of a vector to lie side by side and does not look, and a key to be there.
    """
    tensors = (query, keys, values)
    if _KERNEL is None or not query.is_cpu or torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    if not all(t.numel() and t.stride(-1) == 1 for t in tensors):
        return False
    same_dtype = query.dtype == keys.dtype == values.dtype
    return same_dtype and query.shape[-1] == keys.shape[-1] == values.shape[-1]


def fused_attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attend keys by the kernel.

    Args:
        query: (batch, heads, q_len, head_dim).
        keys, values: (batch, heads, kv_len, head_dim), one key or more.
        scale: of the logits.
        causal: whether query i sees the keys up to i alone.

    Returns:
        (batch, heads, q_len, head_dim) in the dtype of the query, and the log-sum-exp of the
        logits, (batch, heads, q_len) float32.
    """
    assert _KERNEL is not None, "this torch has no such kernel"
    out, lse = _KERNEL(query, keys, values, 0.0, causal, scale=scale)
    return out, lse.float()


def fused_group_attention(
    grouped: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend all keys by the queries of a group at once: as rows of their KV head.

    Args:
        grouped: (batch, kv_heads, group, q_len, head_dim).
        keys, values: (batch, kv_heads, kv_len, head_dim).

    Returns:
        (batch, kv_heads, group, q_len, head_dim) and (batch, kv_heads, group, q_len) float32.
    """
    out, lse = fused_attention(grouped.flatten(2, 3), keys, values, scale)
    return out.unflatten(2, grouped.shape[2:4]), lse.unflatten(2, grouped.shape[2:4])
