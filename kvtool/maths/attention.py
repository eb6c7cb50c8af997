"""Attention of a few queries over cached keys: weights in float32, and their values.

Query head h reads KV head h // group: with 6 query heads and 2 KV heads, heads 0-2 read KV head 0
and 3-5 KV head 1.

The fused kernel of a CPU computes no weights; it returns the log-sum-exp of its rows as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

_KERNEL = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def group_queries(query: Tensor, kv_heads: int) -> Tensor:
    """View queries by the KV head that they read.

    Args:
        query: (batch, heads, q_len, head_dim).

    Returns:
        (batch, kv_heads, group, q_len, head_dim).
    """
    batch, heads, q_len, head_dim = query.shape
    return query.view(batch, kv_heads, heads // kv_heads, q_len, head_dim)


def attention_weights(
    query: Tensor,
    keys: Tensor,
    *,
    scale: float,
    visible: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the softmax of scaled dot products, in float32.

    Args:
        query: (batch, kv_heads, group, q_len, head_dim), after RoPE.
        keys: (batch, kv_heads, kv_len, head_dim), after RoPE.
        visible: bool, broadcastable to (batch, kv_heads, group, q_len, kv_len), or to the last of
            the keys where all before them are visible; None: every key. Each row needs a True.
        softcap: logits become softcap * tanh(logits / softcap) before the mask (Gemma 2).
        sinks: (kv_heads, group) or (batch, kv_heads, group) logits that take their share of each
            row without a value (GPT-OSS); rows then sum to less than 1.

    Returns:
        (batch, kv_heads, group, q_len, kv_len) float32.
    """
    products = dot_products(query, keys)
    return weights_of_products(products, scale, visible, softcap, sinks)


def weights_of_products(
    products: Tensor,
    scale: float,
    visible: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the same of dot products, (batch, kv_heads, group, q_len, kv_len), in place."""
    logits = _logits(products, scale, visible, softcap)
    if sinks is None:
        in_place = logits.is_cpu and not logits.requires_grad  # a fifth faster on long rows
        return torch.softmax(logits, -1, out=logits if in_place else None)
    column = sinks.float()[..., None, None].expand(*logits.shape[:-1], 1)
    return torch.cat([logits, column], -1).softmax(-1)[..., :-1]


def biased_weights(
    query: Tensor,
    keys: Tensor,
    bias: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the softmax of scaled dot products to which numbers are added, in float32.

    Args:
        query, keys, scale, softcap, sinks: as for `attention_weights`.
        bias: float32, broadcastable to (batch, kv_heads, group, q_len, kv_len); added behind the
            cap.

    Returns:
        (batch, kv_heads, group, q_len, kv_len) float32.
    """
    logits = _logits(dot_products(query, keys), scale, None, softcap) + bias
    if sinks is None:
        return logits.softmax(-1)
    column = sinks.float()[..., None, None].expand(*logits.shape[:-1], 1)
    return torch.cat([logits, column], -1).softmax(-1)[..., :-1]


def attention_weights_lse(
    query: Tensor,
    keys: Tensor,
    *,
    scale: float,
    visible: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the weights, and the logarithm of what they were divided by.

    Args:
        query, keys, scale, visible, softcap, sinks: as for `attention_weights`, but a row may see
            no key: its weights are 0.

    Returns:
        (batch, kv_heads, group, q_len, kv_len) and (batch, kv_heads, group, q_len) float32, -inf
        for a row that sees nothing.
    """
    products = dot_products(query, keys)
    return weights_lse_of_products(products, scale, visible, softcap, sinks)


def weights_lse_of_products(
    products: Tensor,
    scale: float,
    visible: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the same of dot products, in place."""
    logits = _logits(products, scale, visible, softcap)
    if visible is None and sinks is None:
        # the largest weight is exp(largest logit - lse): two maxima cost less than a log-sum-exp
        top = logits.amax(-1)
        in_place = logits.is_cpu and not logits.requires_grad
        weights = torch.softmax(logits, -1, out=logits if in_place else None)
        return weights, top - weights.amax(-1).log_()
    lse = logits.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float()[..., None])
    finite = lse.clamp(min=torch.finfo(lse.dtype).min)
    return logits.sub_(finite[..., None]).exp_(), lse


def dot_products(query: Tensor, keys: Tensor) -> Tensor:
    """Multiply queries and keys.

    Args:
        query: (batch, kv_heads, group, q_len, head_dim).
        keys: (batch, kv_heads, kv_len, head_dim).

    Returns:
        (batch, kv_heads, group, q_len, kv_len) float32.
    """
    batch, kv_heads, group, q_len, head_dim = query.shape
    flat = query.reshape(batch * kv_heads, group * q_len, head_dim)
    # bmm on batch and heads together: matmul does the same, and expands both sides before
    products = torch.bmm(flat, keys.flatten(0, 1).transpose(1, 2))
    if products.dtype != torch.float32:  # a conversion to what it is takes time, too
        products = products.float()
    return products.view(batch, kv_heads, group, q_len, -1)


def _logits(
    products: Tensor, scale: float, visible: Tensor | None, softcap: float | None
) -> Tensor:
    """Scale dot products, cap and mask them, in place."""
    logits = products.mul_(scale)
    if softcap is not None:
        logits = torch.tanh_(logits.div_(softcap)).mul_(softcap)
    if visible is not None:
        logits[..., -visible.shape[-1] :].masked_fill_(~visible, float("-inf"))
    return logits


def join_attention(
    out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Join attention over two disjoint sets of keys.

    Softmax over a union is a weighted mean; in logarithms nothing overflows.

    Args:
        out, other_out: (..., value_dim) float32.
        lse, other_lse: (...) log-sum-exp of the logits; -inf for an empty set.

    Returns:
        The output and the log-sum-exp over both.
    """
    weight = torch.sigmoid(lse - other_lse)
    weight = torch.where(other_lse == float("-inf"), 1.0, weight)[..., None]
    return torch.lerp(other_out, out, weight), torch.logaddexp(lse, other_lse)


def weighted_values(weights: Tensor, values: Tensor) -> Tensor:
    """Average the values under the weights.

    Args:
        weights: (batch, kv_heads, group, q_len, kv_len) float32.
        values: (batch, kv_heads, kv_len, value_dim).

    Returns:
        (batch, kv_heads * group, q_len, value_dim) in the dtype of the values.
    """
    batch, kv_heads, group, q_len, kv_len = weights.shape
    if weights.dtype != values.dtype:
        weights = weights.to(values.dtype)
    flat = weights.view(batch * kv_heads, group * q_len, kv_len)
    return torch.bmm(flat, values.flatten(0, 1)).view(batch, kv_heads * group, q_len, -1)


def visible_keys(
    query_positions: Tensor,
    key_positions: Tensor,
    window: int | None = None,
    *,
    chunked: bool = False,
    spans: Tensor | None = None,
) -> Tensor:
    """Mark the keys that each query may see: stored, not later, inside the sliding window.

    Three queries at 2, 3, 4 over keys at 0, 2, 3, 4 and an empty slot (-1), no window:

        1 1 0 0 0
        1 1 1 0 0
        1 1 1 1 0

    Args:
        query_positions: (batch, q_len); -1 marks padding, whose row sees every key so that its
            softmax stays finite.
        key_positions: (batch, kv_heads, kv_len); -1 marks an empty slot.
        window: width of a sliding window, in tokens, the query itself included.
        chunked: whether windows are side by side in place of sliding: a query at position p sees
            keys from p - p % window on.
        spans: (batch, q_len, 2) positions of a first and a last key that a query sees as well,
            whatever the rest says.

    Returns:
        bool (batch, kv_heads, 1, q_len, kv_len).
    """
    query = query_positions[:, None, :, None]
    key = key_positions[:, :, None, :]
    visible = (key >= 0) & (key <= query)
    if window is not None:
        first = query - query % window if chunked else query - window + 1
        visible = visible & (key >= first)
    if spans is not None:
        low, high = spans[:, None, :, :1], spans[:, None, :, 1:]
        visible = visible | ((key >= low) & (key <= high) & (key >= 0))
    return (visible | (query < 0))[:, :, None]


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
