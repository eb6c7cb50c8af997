"""The kernels in plain torch: same arguments, same results, weights in full and rows copied.

The kernels are compared with these, in tests and on a device that they are about to run on.
"""

from __future__ import annotations

import torch

from kvtool.maths.attention import (
    attention_weights,
    group_queries,
    visible_keys,
    weighted_values,
)
from kvtool.maths.channels import take_rows
from kvtool.maths.columns import add_columns


def _logits(query, key, query_positions, key_positions, scale, window, softcap):
    """(batch, heads, q_len, kv_len) float32 logits, -inf where a key is not visible."""
    batch, heads = query.shape[:2]
    grouped = group_queries(query.float(), key.shape[1])
    logits = (grouped @ key.float().unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    visible = visible_keys(query_positions, key_positions, window)
    visible = visible.expand(-1, -1, heads // visible.shape[1], -1, -1).flatten(1, 2)
    return logits.masked_fill(~visible, float("-inf")), visible.expand(batch, heads, -1, -1)


def attend_rows(
    query,
    key,
    value,
    query_positions,
    key_positions,
    *,
    scale,
    window=None,
    softcap=None,
    sinks=None,
    in_order=False,
):
    logits, visible = _logits(query, key, query_positions, key_positions, scale, window, softcap)
    lse = logits.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float()[..., None])
    weights = group_queries((logits - lse[..., None]).exp(), key.shape[1])
    return weighted_values(weights, value), lse, visible.sum(-1).float()


def column_sums(
    query,
    key,
    query_positions,
    key_positions,
    lse,
    seen,
    sums,
    *,
    scale,
    window=None,
    softcap=None,
):
    logits, visible = _logits(query, key, query_positions, key_positions, scale, window, softcap)
    heads = next(iter(sums.values())).shape[1]
    valid = query_positions >= 0
    weights = (logits - lse[..., None]).exp() * valid[:, None, :, None]
    visible = group_queries(visible, heads)[:, :, 0]
    add_columns(sums, group_queries(weights, heads), visible, valid)


def attend_slots(
    query,
    key,
    value,
    positions,
    sums,
    *,
    scale,
    softcap=None,
    sinks=None,
    valid=None,
    weights=False,
    chosen=None,
):
    if chosen is not None:
        lists = chosen.shape[1]
        key, value = (t.repeat_interleave(lists // t.shape[1], 1) for t in (key, value))
        index = chosen[..., None]
        key = key.gather(2, index.expand(*chosen.shape, key.shape[-1]))
        value = value.gather(2, index.expand(*chosen.shape, value.shape[-1]))
    batch, heads, slots = *query.shape[:2], key.shape[2]
    stored = None
    if positions is not None:
        stored = (positions >= 0).repeat_interleave(key.shape[1] // positions.shape[1], 1)
    grouped = group_queries(query, key.shape[1])
    full = attention_weights(
        grouped,
        key,
        scale=scale,
        visible=None if stored is None else stored[:, :, None, None],
        softcap=softcap,
        sinks=None if sinks is None else sinks.view(batch, *grouped.shape[1:3]),
    )
    out = weighted_values(full, value)
    full = full.view(batch, heads, 1, slots)
    if valid is not None:
        full = full * valid[:, None, None, None]
        valid = valid[:, None]
    if sums:
        kv_heads = next(iter(sums.values())).shape[1]
        visible = None if positions is None else (positions >= 0)[:, :, None]
        add_columns(sums, group_queries(full, kv_heads), visible, valid)
    return out, full[:, :, 0] if weights else None


def page_scores(query, bounds, pages):
    both = torch.cat([query.clamp(min=0), query.clamp(max=0)], -1)
    return torch.matmul(both, bounds[..., :pages]).float().sum(2)


def row_product(part, table, rows, columns):
    return torch.matmul(part, take_rows(table, rows)[..., :columns]).float()
