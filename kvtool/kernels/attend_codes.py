"""Attention of one query per row over quantised slots, whose codes are read as they are stored.

Two launches, as `kvtool.kernels.attend_slots` has. Keys and values in full are never in memory: the
first launch dequantises codes in registers. Each of its programs leaves the logits of its part,
their maximum, the sum of exponentials and the mean of its values. Where a slot has one scale (int8,
fp8), codes are multiplied unscaled: the scale of a key is applied to its logit, and that of a value
to its weight. Where groups of channels have scales (int4), codes are multiplied with them first.
Keys and values may have different forms.

A byte of int4 holds channels i and i + DIM / 2. Tiles have the two beside each other, since that is
how registers hold them, and so do the query (keys in int4) and the mean (values in int4).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtool.kernels.join_parts import allocate_parts, join_parts
from kvtool.kernels.tiles import (
    dense,
    load_tile,
    logits_of,
    softmax_step,
    store_part,
    tile_edge,
    width,
)
from kvtool.maths.quantise import FP8_SHIFT, GROUP

_LEAST = tl.constexpr(2.0**-14)  # of all scales but 0: float16's smallest normal


@triton.jit
def channel_of(columns, DIM: tl.constexpr, NIBBLES: tl.constexpr):
    """Find the channel in each column of a tile."""
    channels = columns
    if NIBBLES:
        channels = columns // 2 + columns % 2 * (DIM // 2)
    return channels


@triton.jit
def load_bytes(
    base, slots, stride, limit, FP8: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Load codes of 8 bits: int8, or e4m3 as float16 that are too small by 2 ** 8.

    The bits of e4m3, seven places up, are a float16 whose exponent is too small by 8.
    """
    codes = load_tile(base, slots, stride, limit, DIM, WIDTH)
    if FP8:
        bits = codes.to(tl.uint16)
        codes = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return codes


@triton.jit
def load_nibbles(
    base,
    scales,
    slots,
    stored,
    stride,
    scales_stride,
    limit,
    dtype: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Load codes of 4 bits times their scales, in the order of `channel_of`.

    Half a group of bytes at a time has one scale for its low bits and one for its high bits.
    """
    run: tl.constexpr = GROUP // 2
    runs = tl.arange(0, WIDTH // GROUP)
    real = (runs < DIM // GROUP)[None, :]
    there = (slots < limit)[:, None] & real
    stored = stored[:, None] & real
    slots = slots.to(tl.int64)[:, None]
    first = slots * stride + runs[None, :] * run
    places = first[:, :, None] + tl.arange(0, run)[None, None, :]
    codes = tl.load(base + places, mask=there[:, :, None], other=0).to(tl.int32)
    scales += slots * scales_stride
    low = tl.load(scales + (runs * run // GROUP)[None, :], mask=stored, other=0.0)
    high = tl.load(scales + ((DIM // 2 + runs * run) // GROUP)[None, :], mask=stored, other=0.0)
    lower = ((codes & 15) - 8).to(tl.float32) * low.to(tl.float32)[:, :, None]
    upper = ((codes >> 4) - 8).to(tl.float32) * high.to(tl.float32)[:, :, None]
    numbers = tl.join(lower.to(dtype), upper.to(dtype))
    return tl.reshape(numbers, (slots.shape[0], WIDTH))


@triton.jit(do_not_specialize=["slots", "split"])
def attend_codes_part_kernel(
    query,
    key,
    key_scales,
    value,
    value_scales,
    positions,
    logits,
    part_mean,
    part_top,
    part_total,
    part_seen,
    query_batch,
    query_head,
    key_batch,
    key_head,
    key_row,
    key_scales_batch,
    key_scales_head,
    key_scales_row,
    value_batch,
    value_head,
    value_row,
    value_scales_batch,
    value_scales_head,
    value_scales_row,
    stored_batch,
    stored_head,
    key_heads,
    share,
    stored_share,
    slots,
    split,
    scale,
    softcap,
    DIM: tl.constexpr,
    DIM_WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SHARE_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    KEY_FP8: tl.constexpr,
    KEY_NIBBLES: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    VALUE_FP8: tl.constexpr,
    VALUE_NIBBLES: tl.constexpr,
    VALUE_SHIFT: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Attend to one part of the slots of a head by the queries that share it."""
    own = tl.program_id(0) % key_heads
    batch = (tl.program_id(0) // key_heads).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    members = tl.arange(0, SHARE_WIDTH)
    real = members < share
    line = batch * key_heads * share + own * share + members
    head = own.to(tl.int64)
    key += batch * key_batch + head * key_head
    key_scales += batch * key_scales_batch + head * key_scales_head
    value += batch * value_batch + head * value_head
    value_scales += batch * value_scales_batch + head * value_scales_head
    positions += batch * stored_batch + (own * share // stored_share).to(tl.int64) * stored_head
    query += batch * query_batch + head * share * query_head
    columns = tl.arange(0, DIM_WIDTH)
    tile = tl.load(
        query + members[:, None] * query_head + channel_of(columns, DIM, KEY_NIBBLES)[None, :],
        mask=real[:, None] & (columns < DIM)[None, :],
        other=0.0,
    )
    dtype: tl.constexpr = tile.dtype

    highest = tl.full((SHARE_WIDTH,), float("-inf"), tl.float32)
    total = tl.zeros((SHARE_WIDTH,), tl.float32)
    seen = tl.zeros((KEYS,), tl.float32)
    mean = tl.zeros((SHARE_WIDTH, VALUE_WIDTH), tl.float32)
    stop = tl.minimum((part + 1) * split, slots)
    for low in range(part * split, stop, KEYS):
        places = low + tl.arange(0, KEYS)
        stored = places < stop
        if MASKED:
            stored = stored & (tl.load(positions + places, mask=stored, other=-1) >= 0)
        lines = places.to(tl.int64)
        if KEY_NIBBLES:
            keys = load_nibbles(
                key,
                key_scales,
                places,
                stored,
                key_row,
                key_scales_row,
                stop,
                dtype,
                DIM,
                DIM_WIDTH,
                GROUP,
            )
            found = logits_of(tile, keys, scale, softcap, CAPPED)
        else:
            keys = load_bytes(key, places, key_row, stop, KEY_FP8, DIM, DIM_WIDTH).to(dtype)
            sizes = tl.load(key_scales + lines * key_scales_row, mask=stored, other=0.0)
            sizes = sizes.to(tl.float32) * (scale * KEY_SHIFT)
            found = logits_of(tile, keys, sizes[None, :], softcap, CAPPED)
        found = tl.where(stored[None, :], found, float("-inf"))
        tl.store(
            logits + line[:, None] * slots + places[None, :],
            found,
            mask=real[:, None] & (places < stop)[None, :],
        )
        highest, total, weights, shrink = softmax_step(found, highest, total)
        seen += stored.to(tl.float32)
        mean = mean * shrink[:, None]
        if VALUE_NIBBLES:
            values = load_nibbles(
                value,
                value_scales,
                places,
                stored,
                value_row,
                value_scales_row,
                stop,
                dtype,
                VALUE_DIM,
                VALUE_WIDTH,
                GROUP,
            )
            mean += tl.dot(weights.to(dtype), values, input_precision="ieee")
        else:
            values = load_bytes(value, places, value_row, stop, VALUE_FP8, VALUE_DIM, VALUE_WIDTH)
            sizes = tl.load(value_scales + lines * value_scales_row, mask=stored, other=0.0)
            sizes = sizes.to(tl.float32) * VALUE_SHIFT
            largest = 1.0
            if dtype == tl.float16:  # weights times small scales would fall below its range
                largest = tl.maximum(tl.max(sizes, 0), _LEAST)
            scaled = (weights * (sizes / largest)[None, :]).to(dtype)
            mean += tl.dot(scaled, values.to(dtype), input_precision="ieee") * largest

    store_part(
        part_mean,
        part_top,
        part_total,
        part_seen,
        line * parts + part,
        real,
        channel_of(tl.arange(0, VALUE_WIDTH), VALUE_DIM, VALUE_NIBBLES),
        mean,
        highest,
        total,
        seen,
        VALUE_DIM,
        VALUE_WIDTH,
    )


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
        forms: of the codes of keys and of values: int8, fp8 or int4.
        value_dim: channels of a value.
        scale, softcap, sinks, valid, weights: as for `kvtool.kernels.attend_slots.attend_slots`.

    Returns:
        (batch, heads, 1, value_dim) in the dtype of the query, rotated if the values were, and the
        weights, (batch, heads, slots) float32, 0 in rows of padding; None if they are not asked
        for.
    """
    of_keys, of_values = forms
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
            KEY_FP8=of_keys == "fp8",
            KEY_NIBBLES=of_keys == "int4",
            KEY_SHIFT=FP8_SHIFT if of_keys == "fp8" else 1.0,
            VALUE_FP8=of_values == "fp8",
            VALUE_NIBBLES=of_values == "int4",
            VALUE_SHIFT=FP8_SHIFT if of_values == "fp8" else 1.0,
            GROUP=GROUP,
        )
    return join_parts(
        parts, query.dtype, sums, key_heads, sinks=sinks, valid=valid, weights=weights
    )
