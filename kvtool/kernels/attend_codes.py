"""Attention of one query per row over quantised slots, whose codes are read as they lie.

Two launches, as `kvtool.kernels.attend_slots` has. Keys and values in full are never in memory.
"""

import torch
from torch import Tensor

from kvtool.kernels.attend_codes_part import attend_codes_part_kernel
from kvtool.kernels.join_parts import allocate_parts, join_parts
from kvtool.kernels.tiles import dense, tile_edge, width
from kvtool.maths.quantise import FP8_SHIFT, GROUP


def attend_codes(
    query: Tensor,
    key_codes: Tensor,
    key_scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    positions: Tensor | None,
    sums: dict[str, Tensor],
    *,
    form: str,
    value_dim: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    valid: Tensor | None = None,
    weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend one query per batch entry over quantised slots, and count its weights in place.

    Args:
        query: (batch, heads, 1, head_dim), after RoPE, and rotated if the keys were.
        key_codes, value_codes: (batch, heads of the attention, slots, bytes) of int8 or uint8, as
            `kvtool.maths.quantise` makes them; views of larger buffers are read as they lie.
        key_scales, value_scales: (batch, heads of the attention, slots, 1 or dim / 32) float16.
        positions: (batch, kv_heads, slots) int, -1 = empty slot; None: no slot is empty.
        sums: some of `COLUMNS` by name, (batch, kv_heads, slots) float32, laid out alike.
        form: of the codes: int8, fp8 or int4.
        value_dim: channels of a value.
        scale, softcap, sinks, valid, weights: as for `kvtool.kernels.attend_slots.attend_slots`.

    Returns:
        (batch, heads, 1, value_dim) in the dtype of the query, rotated if the values were, and the
        weights, (batch, heads, slots) float32, 0 in rows of padding; None if nobody wants them.
    """
    query = dense(query[:, :, 0])
    codes = [dense(tensor) for tensor in (key_codes, key_scales, value_codes, value_scales)]
    batch, heads, head_dim = query.shape
    key_heads, slots = key_codes.shape[1:3]
    share = heads // key_heads
    parts = allocate_parts(query, slots, value_dim)
    stored = query if positions is None else dense(positions)
    with torch.cuda.device_of(query):
        attend_codes_part_kernel[(batch * key_heads, parts.count)](
            query,
            *codes,
            stored,
            parts.logits,
            parts.mean,
            *parts.numbers,
            *query.stride()[:2],
            *(stride for tensor in codes for stride in tensor.stride()[:3]),
            *stored.stride()[:2],
            key_heads,
            share,
            heads // stored.shape[1],
            slots,
            parts.split,
            scale,
            softcap or 1.0,
            DIM=head_dim,
            DIM_WIDTH=width(head_dim),
            VALUE_DIM=value_dim,
            VALUE_WIDTH=width(value_dim),
            SHARE_WIDTH=width(share),
            KEYS=tile_edge(query, parts.mean, rows=width(share)),
            CAPPED=softcap is not None,
            MASKED=positions is not None,
            FP8=form == "fp8",
            NIBBLES=form == "int4",
            GROUP=GROUP,
            SHIFT=FP8_SHIFT if form == "fp8" else 1.0,
        )
    return join_parts(
        parts, query.dtype, sums, key_heads, sinks=sinks, valid=valid, weights=weights
    )
