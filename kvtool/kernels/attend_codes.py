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
    softmax_step,
    tile_edge,
    width,
)
from kvtool.maths.quantise import FP8_SHIFT

_LEAST = tl.constexpr(2.0**-14)  # of all scales but 0: float16's smallest normal


@triton.jit
def channels_of(columns, PLANE: tl.constexpr, DIM: tl.constexpr, NIBBLES: tl.constexpr):
    """Find the channel that a plane of words holds in each column."""
    if NIBBLES:
        return columns * 2 + PLANE // 2 + PLANE % 2 * (DIM // 2)
    return columns * 2 + PLANE


@triton.jit
def load_words(base, slots, stride, limit, WORDS: tl.constexpr, WIDTH: tl.constexpr):
    """Load codes two bytes at a time, 0 beyond the last slot and column. The stride is in bytes."""
    columns = tl.arange(0, WIDTH)
    inside = (slots < limit)[:, None] & (columns < WORDS)[None, :]
    rows = (base + slots.to(tl.int64) * stride).to(tl.pointer_type(tl.int16))
    return tl.load(rows[:, None] + columns[None, :], mask=inside, other=0)


@triton.jit
def decode_plane(words, PLANE: tl.constexpr, FP8: tl.constexpr, NIBBLES: tl.constexpr, dtype):
    """Take one code out of each word: as it is, or e4m3 too small by 2 ** 8.

    The bits of e4m3, seven places up, are a float16 whose exponent is too small by 8.
    """
    if NIBBLES:
        return (((words >> (4 * PLANE)) & 15) - 8).to(dtype)
    if FP8:
        bits = (words if PLANE else words << 8).to(tl.uint16)
        bits = (bits & 0x8000) | ((bits >> 1) & 0x3F80)
        return bits.to(tl.float16, bitcast=True).to(dtype)
    return ((words if PLANE else words << 8) >> 8).to(dtype)


@triton.jit
def load_scales(scales, slots, stride, stored, GROUPS: tl.constexpr, LINES: tl.constexpr):
    """Load the scales of each group of channels, one line each: 0 for what is not stored."""
    groups = tl.arange(0, LINES)[:, None]
    places = slots.to(tl.int64)[None, :] * stride + groups
    there = stored[None, :] & (groups < GROUPS)
    return tl.load(scales + places, mask=there, other=0.0).to(tl.float32)


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
    WORDS: tl.constexpr,
    WORDS_WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    LINES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    VALUE_WORDS_WIDTH: tl.constexpr,
    VALUE_GROUPS: tl.constexpr,
    VALUE_LINES: tl.constexpr,
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
    dtype: tl.constexpr = query.dtype.element_ty
    rows = tl.arange(0, LINES * SHARE_WIDTH)[:, None]
    columns = tl.arange(0, WORDS_WIDTH)[None, :]
    tiles = ()
    for plane in tl.static_range(4 if KEY_NIBBLES else 2):
        channels = channels_of(columns, plane, DIM, KEY_NIBBLES)
        there = (rows % SHARE_WIDTH < share) & (columns < WORDS)
        there &= channels // (DIM // GROUPS) == rows // SHARE_WIDTH
        numbers = query + rows % SHARE_WIDTH * query_head + channels
        tiles = tiles + (tl.load(numbers, mask=there, other=0.0),)

    highest = tl.full((SHARE_WIDTH,), float("-inf"), tl.float32)
    total = tl.zeros((SHARE_WIDTH,), tl.float32)
    seen = tl.zeros((KEYS,), tl.float32)
    means = ()
    for _ in tl.static_range(4 if VALUE_NIBBLES else 2):
        means = means + (tl.zeros((VALUE_LINES * SHARE_WIDTH, VALUE_WORDS_WIDTH), tl.float32),)
    stop = tl.minimum((part + 1) * split, slots)
    for low in range(part * split, stop, KEYS):
        places = low + tl.arange(0, KEYS)
        stored = places < stop
        if MASKED:
            stored = stored & (tl.load(positions + places, mask=stored, other=-1) >= 0)
        words = load_words(key, places, key_row, stop, WORDS, WORDS_WIDTH)
        found = tl.zeros((LINES * SHARE_WIDTH, KEYS), tl.float32)
        for plane in tl.static_range(4 if KEY_NIBBLES else 2):
            codes = decode_plane(words, plane, KEY_FP8, KEY_NIBBLES, dtype)
            found = tl.dot(tiles[plane], tl.trans(codes), found, input_precision="ieee")
        sizes = load_scales(key_scales, places, key_scales_row, stored, GROUPS, LINES)
        found = tl.reshape(found, (LINES, SHARE_WIDTH, KEYS)) * sizes[:, None, :]
        found = tl.sum(found, 0) * (scale * KEY_SHIFT)
        if CAPPED:
            found = softcap * (1 - 2 / (tl.exp(2 * found / softcap) + 1))  # softcap * tanh
        found = tl.where(stored[None, :], found, float("-inf"))
        tl.store(
            logits + line[:, None] * slots + places[None, :],
            found,
            mask=real[:, None] & (places < stop)[None, :],
        )
        highest, total, weights, shrink = softmax_step(found, highest, total)
        seen += stored.to(tl.float32)
        words = load_words(value, places, value_row, stop, VALUE_WORDS, VALUE_WORDS_WIDTH)
        sizes = load_scales(
            value_scales, places, value_scales_row, stored, VALUE_GROUPS, VALUE_LINES
        )
        sizes *= VALUE_SHIFT
        largest = 1.0
        if dtype == tl.float16:  # weights times small scales would fall below its range
            largest = tl.maximum(tl.max(sizes), _LEAST)
        scaled = weights[None, :, :] * (sizes / largest)[:, None, :]
        scaled = tl.reshape(scaled, (VALUE_LINES * SHARE_WIDTH, KEYS)).to(dtype)
        shrinks = tl.broadcast_to(shrink[None, :], (VALUE_LINES, SHARE_WIDTH))
        shrinks = tl.reshape(shrinks, (VALUE_LINES * SHARE_WIDTH, 1))
        updated = ()
        for plane in tl.static_range(4 if VALUE_NIBBLES else 2):
            codes = decode_plane(words, plane, VALUE_FP8, VALUE_NIBBLES, dtype)
            added = tl.dot(scaled, codes, input_precision="ieee") * largest
            updated = updated + (means[plane] * shrinks + added,)
        means = updated

    columns = tl.arange(0, VALUE_WORDS_WIDTH)
    groups = tl.arange(0, VALUE_LINES)[:, None]
    for plane in tl.static_range(4 if VALUE_NIBBLES else 2):
        channels = channels_of(columns, plane, VALUE_DIM, VALUE_NIBBLES)
        of_group = groups == (channels // (VALUE_DIM // VALUE_GROUPS))[None, :]
        mean = tl.reshape(means[plane], (VALUE_LINES, SHARE_WIDTH, VALUE_WORDS_WIDTH))
        mean = tl.sum(tl.where(of_group[:, None, :], mean, 0.0), 0)
        tl.store(
            part_mean + (line * parts + part)[:, None] * VALUE_DIM + channels[None, :],
            mean,
            mask=real[:, None] & (columns < VALUE_WORDS)[None, :],
        )
    tl.store(part_top + line * parts + part, highest, mask=real)
    tl.store(part_total + line * parts + part, total, mask=real)
    tl.store(part_seen + line * parts + part, tl.zeros_like(total) + tl.sum(seen, 0), mask=real)


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
    words = [tensor.shape[-1] // 2 for tensor in codes[::2]]
    groups = [tensor.shape[-1] for tensor in codes[1::2]]
    lines = [triton.next_power_of_2(count) for count in groups]
    members = max(triton.next_power_of_2(share), 16 // max(lines))
    lines = [max(count, 16 // members) for count in lines]
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
            WORDS=words[0],
            WORDS_WIDTH=width(words[0]),
            GROUPS=groups[0],
            LINES=lines[0],
            VALUE_DIM=value_dim,
            VALUE_WORDS=words[1],
            VALUE_WORDS_WIDTH=width(words[1]),
            VALUE_GROUPS=groups[1],
            VALUE_LINES=lines[1],
            SHARE_WIDTH=members,
            KEYS=tile_edge(query, parts.mean, rows=members * max(lines)),
            CAPPED=softcap is not None,
            MASKED=positions is not None,
            KEY_FP8=of_keys == "fp8",
            KEY_NIBBLES=of_keys == "int4",
            KEY_SHIFT=FP8_SHIFT if of_keys == "fp8" else 1.0,
            VALUE_FP8=of_values == "fp8",
            VALUE_NIBBLES=of_values == "int4",
            VALUE_SHIFT=FP8_SHIFT if of_values == "fp8" else 1.0,
        )
    return join_parts(
        parts, query.dtype, sums, key_heads, sinks=sinks, valid=valid, weights=weights
    )
