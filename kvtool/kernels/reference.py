"""The kernels in plain torch: same arguments, same results, weights in full and rows copied.

The kernels are compared with these, in tests and on a device that they are about to run on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvtool.maths.attention import (
    attention_weights,
    attention_weights_lse,
    group_queries,
    visible_keys,
    weighted_values,
)
from kvtool.maths.columns import add_columns
from kvtool.maths.estimates import take_rows
from kvtool.maths.quantise import are_apart, from_fp8, from_int4, from_int8

_DEQUANTISED = {"int8": from_int8, "fp8": from_fp8, "int4": from_int4}


def _weights(
    query: Tensor,
    key: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    **how: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute weights by KV head, their log-sum-exp by head, and which keys are visible."""
    grouped = group_queries(query.float(), key.shape[1])
    visible = visible_keys(query_positions, key_positions, window)
    by_head = visible.repeat_interleave(query.shape[1] // visible.shape[1], 1)
    how["sinks"] = None if sinks is None else sinks.view(grouped.shape[:3])
    how["visible"] = by_head.reshape(len(visible), key.shape[1], -1, *visible.shape[3:])
    weights, lse = attention_weights_lse(grouped, key.float(), **how)
    return weights, lse.flatten(1, 2), visible[:, :, 0]


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *positions: Tensor,
    in_order: bool = False,
    **how: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `kvtool.kernels.attend_rows.attend_rows` does."""
    weights, lse, visible = _weights(query, key, *positions, **how)
    seen = visible.sum(-1).repeat_interleave(query.shape[1] // visible.shape[1], 1)
    return weighted_values(weights, value), lse, seen.expand(lse.shape).float()


def column_sums(
    query: Tensor,
    key: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    lse: Tensor,
    seen: Tensor,
    sums: dict[str, Tensor],
    **how: Any,
) -> None:
    """Compute what `kvtool.kernels.column_sums.column_sums` does."""
    weights, own, visible = _weights(query, key, query_positions, key_positions, **how)
    valid, heads = query_positions >= 0, next(iter(sums.values())).shape[1]
    share = (own - lse).exp() * valid[:, None]  # of sinks the log-sum-exp knows alone
    weights = group_queries(weights.flatten(1, 2) * share[..., None], heads)
    visible = visible.repeat_interleave(heads // visible.shape[1], 1)
    add_columns(sums, weights, visible, valid)


def attend_slots(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor | None,
    sums: dict[str, Tensor],
    *,
    sinks: Tensor | None = None,
    place: Tensor | None = None,
    weights: bool = False,
    chosen: Tensor | None = None,
    **how: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute what `kvtool.kernels.attend_slots.attend_slots` does."""
    if chosen is not None:
        key, value = _take_lists(key, chosen), _take_lists(value, chosen)
    grouped = group_queries(query, key.shape[1])
    how["sinks"] = None if sinks is None else sinks.view(grouped.shape[:3])
    stored = None if positions is None else positions >= 0
    if stored is not None:
        by_head = stored.repeat_interleave(key.shape[1] // stored.shape[1], 1)
        how["visible"], stored = by_head[:, :, None, None], stored[:, :, None]
    full = attention_weights(grouped, key, **how)
    out = weighted_values(full, value)
    full = full.flatten(1, 2)
    valid = None if place is None else place[:, None] >= 0
    if valid is not None:
        full = full * valid[..., None, None]
    if sums:
        add_columns(sums, group_queries(full, next(iter(sums.values())).shape[1]), stored, valid)
    return out, full[:, :, 0] if weights else None


def attend_codes(
    query: Tensor,
    codes: Sequence[Tensor],
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
    key, value = of_keys(*codes[:2]), of_values(*codes[2:])
    dtype, query = query.dtype, query.float()
    if constants is not None:  # a channel more
        query = torch.cat([query, constants[..., None, None]], -1)
        key = torch.cat([key, ~are_apart(codes[1])], -1)
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
