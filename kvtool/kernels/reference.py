"""The kernels in plain torch: same arguments, same results, weights in full and rows copied.

The kernels are compared with these, in tests and on a device that they are about to run on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvtool.maths.attention import (
    attention_weights,
    group_queries,
    visible_keys,
    weighted_values,
)
from kvtool.maths.columns import add_columns
from kvtool.maths.estimates import take_rows
from kvtool.maths.quantise import are_centred, from_fp8, from_int4, from_int8
from kvtool.maths.selection import lowest

_DEQUANTISED = {"int8": from_int8, "fp8": from_fp8, "int4": from_int4}


def _logits(
    query: Tensor,
    key: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Compute (batch, heads, q_len, kv_len) float32 logits, and which keys are visible.

    Logits of keys that are not visible are -inf.
    """
    batch, heads = query.shape[:2]
    grouped = group_queries(query.float(), key.shape[1])
    logits = (grouped @ key.float().unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    visible = visible_keys(query_positions, key_positions, window)
    visible = visible.expand(-1, -1, heads // visible.shape[1], -1, -1).flatten(1, 2)
    return logits.masked_fill(~visible, float("-inf")), visible.expand(batch, heads, -1, -1)


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    in_order: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `kvtool.kernels.attend_rows.attend_rows` does."""
    logits, visible = _logits(query, key, query_positions, key_positions, scale, window, softcap)
    lse = logits.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float()[..., None])
    weights = group_queries((logits - lse[..., None]).exp(), key.shape[1])
    return weighted_values(weights, value), lse, visible.sum(-1).float()


def column_sums(
    query: Tensor,
    key: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    lse: Tensor,
    seen: Tensor,
    sums: dict[str, Tensor],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Compute what `kvtool.kernels.column_sums.column_sums` does."""
    logits, visible = _logits(query, key, query_positions, key_positions, scale, window, softcap)
    heads = next(iter(sums.values())).shape[1]
    valid = query_positions >= 0
    weights = (logits - lse[..., None]).exp() * valid[:, None, :, None]
    visible = group_queries(visible, heads)[:, :, 0]
    add_columns(sums, group_queries(weights, heads), visible, valid)


def attend_slots(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor | None,
    sums: dict[str, Tensor],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    valid: Tensor | None = None,
    weights: bool = False,
    chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute what `kvtool.kernels.attend_slots.attend_slots` does."""
    if chosen is not None:
        key, value = _take_lists(key, chosen), _take_lists(value, chosen)
    batch, heads = query.shape[:2]
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
    full = full.view(batch, heads, 1, key.shape[2])
    if valid is not None:
        full = full * valid[:, None, None, None]
        valid = valid[:, None]
    if sums:
        kv_heads = next(iter(sums.values())).shape[1]
        visible = None if positions is None else (positions >= 0)[:, :, None]
        add_columns(sums, group_queries(full, kv_heads), visible, valid)
    return out, full[:, :, 0] if weights else None


def decode_token(
    query: Tensor,
    buffers: list[Tensor],
    columns: list[Tensor],
    new: list[Tensor],
    sinks: Tensor | None,
    seen: Tensor | None,
    *,
    names: str,
    used: int,
    masked: bool,
    appends: bool,
    score: str,
    by_values: bool,
    limits: list[int],
    **how: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute what `kvtool.kernels.decode_token.decode_token` does."""
    *slots, slot = buffers
    at, place = slot[..., None], new[2]
    for buffer, own in zip(slots, new[:2], strict=False):
        buffer.scatter_(2, at[..., None].expand_as(own), own)
    slots[2].scatter_(2, at, place.to(torch.int32)[:, None, None].expand_as(at))
    for total in columns:
        total.scatter_(2, at, 0.0)
    key, value, positions = (tensor[:, :, :used] for tensor in slots)
    sums = {n: each[:, :, :used] for n, each in zip(names.split(), columns, strict=True)}
    held, valid = positions if masked or appends else None, place >= 0 if masked else None
    found = attend_slots(query, key, value, held, sums, sinks=sinks, valid=valid, **how)
    if appends:
        slot += 1
    elif score and seen is not None:
        (recent, first, budget), numbers = limits, sums.get(score, positions).float()
        numbers = _output_change(numbers, value, positions) if by_values else numbers
        protected = (positions >= seen[:, None, None] - recent) | (positions < first)
        over, empty = (positions >= 0).sum(-1, keepdim=True) > budget, positions < 0
        if masked:
            numbers = numbers.masked_fill(empty & ~over, float("-inf"))
            protected = (protected | empty) & over
        slot.copy_(lowest(numbers, positions, protected))
    return found


def _output_change(scores: Tensor, value: Tensor, positions: Tensor) -> Tensor:
    """Compute how far the output moves without each slot, by shares of the scores."""
    stored = positions >= 0
    scores = scores.masked_fill(~stored, 0)
    total = scores.sum(-1, keepdim=True)
    share = torch.where(total > 0, scores / total, stored / stored.sum(-1, keepdim=True))
    mean = share.unsqueeze(2) @ value.float()
    change = share / (1 - share) * (value.float() - mean).norm(dim=-1)
    return change.masked_fill(1 - share < 1e-6, float("inf"))


def attend_codes(
    query: Tensor,
    key_codes: Tensor,
    key_scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    positions: Tensor | None,
    sums: dict[str, Tensor],
    *,
    forms: tuple[str, str],
    value_dim: int,
    constants: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute what `kvtool.kernels.attend_codes.attend_codes` does, in float32."""
    of_keys, of_values = (_DEQUANTISED[form] for form in forms)
    key, value = of_keys(key_codes, key_scales), of_values(value_codes, value_scales)
    dtype, query = query.dtype, query.float()
    if constants is not None:  # a channel more
        query = torch.cat([query, constants[..., None, None]], -1)
        key = torch.cat([key, are_centred(key_scales)], -1)
    out, found = attend_slots(query, key, value, positions, sums, **options)
    return out.view(*query.shape[:3], value_dim).to(dtype), found


def _take_lists(slots: Tensor, chosen: Tensor) -> Tensor:
    """Copy (batch, kv_heads, slots, dim) by lists of slots, (batch, lists, count)."""
    slots = slots.repeat_interleave(chosen.shape[1] // slots.shape[1], 1)
    return slots.gather(2, chosen[..., None].expand(*chosen.shape, slots.shape[-1]))


def page_scores(query: Tensor, bounds: Tensor, pages: int) -> Tensor:
    """Compute what `kvtool.kernels.tables.page_scores` does."""
    both = torch.cat([query.clamp(min=0), query.clamp(max=0)], -1)
    return torch.matmul(both, bounds[..., :pages]).float().sum(2)


def row_product(part: Tensor, table: Tensor, rows: Tensor, columns: int) -> Tensor:
    """Compute what `kvtool.kernels.tables.row_product` does."""
    taken = take_rows(table, rows)
    product = torch.bmm(part.flatten(0, 1), taken.flatten(0, 1)[..., :columns])
    return product.view(*part.shape[:3], columns).float()
