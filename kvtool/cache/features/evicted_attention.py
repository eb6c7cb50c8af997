"""Attention of held queries to evicted tokens: to some, to what is fetched, to one more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from kvtool.cache.features.host import Chunk
from kvtool.maths.attention import (
    attention_weights_lse,
    can_fuse,
    dot_products,
    fused_group_attention,
    group_queries,
    join_attention,
    weighted_values,
)

NOTHING = float("-inf")
"""The log-sum-exp over no tokens."""


def attend_tokens(
    grouped: Tensor,
    keys: Tensor,
    values: Tensor,
    stored: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Attend some tokens by queries of the same heads.

    Args:
        grouped: (batch, kv_heads, group, rows, head_dim).
        keys, values: (batch, kv_heads, tokens, dim).
        stored: bool (batch, kv_heads, tokens), where there is one; None: everywhere.
        scale, softcap: as for `attention_weights`.

    Returns:
        (batch, kv_heads, group, rows, value_dim) and (batch, kv_heads, group, rows) float32.
    """
    if stored is None and softcap is None and can_fuse(grouped, keys, values):
        out, lse = fused_group_attention(grouped, keys, values, scale)
        return out.float(), lse
    visible = None if stored is None else stored[..., None, None, :]
    weights, lse = attention_weights_lse(
        grouped, keys, scale=scale, softcap=softcap, visible=visible
    )
    return weighted_values(weights, values).float().unflatten(1, grouped.shape[1:3]), lse


@torch.no_grad()
def attend_chunks(
    query: Tensor,
    kv_heads: int,
    value_dim: int,
    fetched: Iterator[Chunk],
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Attend what is fetched, by queries (batch, heads, rows, head_dim).

    Returns:
        (batch, heads, rows, value_dim) and (batch, heads, rows) float32, -inf for other heads.
    """
    grouped = group_queries(query, kv_heads)
    out = torch.zeros(*grouped.shape[:-1], value_dim, dtype=torch.float32, device=query.device)
    lse = torch.full(grouped.shape[:-1], NOTHING, dtype=torch.float32, device=query.device)
    begun: set[tuple[int, int]] = set()
    for (entry, run), chunks in groupby(fetched, lambda chunk: (chunk.entry, chunk.heads)):
        own = slice(entry, entry + 1), run
        parts = (_attend_chunk(grouped[own], chunk, scale, softcap) for chunk in chunks)
        part = next(parts)
        for other in parts:
            part = join_attention(*part, *other)
        heads = {(entry, head) for head in range(run.start, run.stop)}
        if heads & begun:
            part = join_attention(out[own], lse[own], *part)
        out[own], lse[own] = part
        begun |= heads
    return out.flatten(1, 2), lse.flatten(1, 2)


def _attend_chunk(
    grouped: Tensor, chunk: Chunk, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    keys, values, stored = chunk.wait(grouped.dtype)
    return attend_tokens(grouped, keys, values, stored, scale, softcap)


def join_token(
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    key: Tensor,
    value: Tensor,
    stored: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Join one token in: its weight among itself is 1, and its logit is its log-sum-exp.

    Args:
        query, out, lse: (batch, heads, dim) float32 and without dim, of attending other tokens.
        key, value: (batch, kv_heads, 1, dim) of the token.
        stored: bool (batch, kv_heads, 1), where there is one; None: everywhere.
    """
    kv_heads = key.shape[1]
    logit = dot_products(group_queries(query[:, :, None].to(key.dtype), kv_heads), key).mul_(scale)
    if softcap is not None:
        logit = logit.div_(softcap).tanh_().mul_(softcap)
    if stored is not None:
        logit = logit.masked_fill_(~stored[..., None, None], NOTHING)
    values = value.float().expand(-1, -1, lse.shape[1] // kv_heads, -1).flatten(1, 2)
    if stored is not None:
        return join_attention(out, lse, values, logit.flatten(1))
    own = logit.flatten(1)
    weight = torch.sigmoid(lse - own)[..., None]
    return torch.lerp(values, out, weight), torch.logaddexp(lse, own)
