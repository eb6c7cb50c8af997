"""Attention of one query per row over quantised slots, whose codes are read as they are stored.

Two launches, as `kvtool.kernels.attend_slots` has. Keys and values in full are never in memory: the
first launch turns codes into numbers in registers. Each of its programs leaves the logits of its
part, their maximum, the sum of exponentials and the mean of its values. Keys and values may have
different forms.

Codes are loaded 16 bytes a thread, and are words of two bytes from there on: matrix units are fed
with words of that size. Each thread takes the codes of a word apart by shifts, and each place in a
word is a product of its own, with the channels of the query that belong there. A word holds
channels 2i and 2i + 1; with 4 bits, it holds these of the lower half of the channels in low bits,
and of the upper half in high bits.

Codes enter the products unscaled: the scale of a key is applied to its logit, and that of a value
to its weight. A key whose scales are not negative is centred: what a query makes of the centre is
added to its logit. Where groups of channels have scales (int4), a tile has a line for each group,
in which the query is 0 in other groups' channels.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.driver import driver

from kvtool.kernels.join_parts import allocate_parts, join_parts
from kvtool.kernels.tiles import of_head, softmax_step, strided, tile_edge, width
from kvtool.maths.quantise import FP8_SHIFT

_ROWS = 8  # of a tile, at least
_LEAST = tl.constexpr(2.0**-14)  # of all scales but 0: float16's smallest normal


class Layout(NamedTuple):
    """How codes lie in memory and in tiles, known when a kernel is compiled.

    Attributes:
        dim: channels of a vector.
        halves: of the channels, which share bytes; 1 for codes of 8 bits.
        words: of a vector, and `width` columns of a tile.
        groups: of channels with a scale each.
        lines: of a tile, at least as many as there are groups in a half.
        fp8: whether codes are e4m3.
        shift: what scales have to be multiplied with.
        paired: whether two words are decoded at once.
        assembly: what does so, for each place in a word.
    """

    dim: int
    halves: int
    words: int
    width: int
    groups: int
    lines: int
    fp8: bool
    shift: float
    paired: bool
    assembly: tuple[str, ...]


@functools.cache
def has_pairs(device: torch.device) -> bool:
    """Whether kernels run on a GPU whose instructions for pairs of bfloat16 are known here."""
    if not isinstance(attend_codes_part_kernel, triton.JITFunction):
        return False  # interpreted
    target = driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 80


@functools.cache
def assemble(form: str, dtype: torch.dtype) -> tuple[str, ...]:
    """Write PTX that turns two words into two numbers of 16 bits, for each place in a word.

    Low bits of 128 in bfloat16, and of 1024 in float16, count ones, and the zero is subtracted from
    them. Of int8 the highest bit stands for -128: with it, the zero is 128 larger in both types.
    Bits of e4m3 are moved to their places, and in bfloat16 make up for its larger exponents.
    """
    brain = dtype == torch.bfloat16
    pair, ones, minus = ("bf16x2", 0x4300, 0xBF80) if brain else ("f16x2", 0x6400, 0xBC00)
    if form == "fp8":
        right, bits, times = (4, 0x07F0, 0x7780) if brain else (1, 0x3F80, 0x3C00)
        template = (
            f"shl.b32 a, $1, {{left}}; shr.b32 b, a, {right}; and.b32 a, a, {_twice(0x8000)}; "
            f"and.b32 b, b, {_twice(bits)}; or.b32 a, a, b; "
            f"mov.b32 b, {_twice(times)}; mov.b32 c, {_twice(0x8000)}; fma.rn.{pair} $0, a, b, c;"
        )
    else:
        bits, sign, zero = (0xF, 0, ones | 8) if form == "int4" else (0x7F, 0x80, ones)
        template = (
            f"shr.b32 b, $1, {{right}}; mov.b32 c, {_twice(ones)}; "
            f"lop3.b32 a, b, {_twice(bits)}, c, 0xEA; "  # b & bits | c
            f"mov.b32 c, {_twice(zero)}; lop3.b32 b, b, {_twice(sign)}, c, 0xEA; "
            f"mov.b32 c, {_twice(minus)}; fma.rn.{pair} $0, b, c, a;"
        )
    halves = (0, 1) if form == "int4" else (0,)
    moves = [
        {"left": 8 - 8 * byte, "right": 4 * half + 8 * byte} for half in halves for byte in (0, 1)
    ]
    return tuple("{ .reg .b32 a, b, c; " + template.format(**move) + " }" for move in moves)


def _twice(bits: int) -> str:
    return f"0x{bits:04X}{bits:04X}"


def lay_out(form: str, dim: int, codes: Tensor, scales: Tensor, query: Tensor) -> Layout:
    """Find how codes lie, with no more lines than they need."""
    halves, words, groups = 1 + (form == "int4"), codes.shape[-1] // 2, scales.shape[-1]
    lines = triton.next_power_of_2(triton.cdiv(groups, halves))
    paired = query.element_size() == 2 and has_pairs(query.device)
    assembly = assemble(form, query.dtype) if paired else ()
    of_groups = groups, lines, form == "fp8", FP8_SHIFT if form == "fp8" else 1.0
    return Layout(dim, halves, words, width(words), *of_groups, paired, assembly)


@triton.jit
def load_words(base, slots, stride, limit, CODES: tl.constexpr):
    """Load codes two bytes at a time, 0 beyond the last slot and column. The stride is in bytes."""
    columns = tl.arange(0, CODES.width)
    inside = (slots < limit)[:, None] & (columns < CODES.words)[None, :]
    rows = (base + slots.to(tl.int64) * stride).to(tl.pointer_type(tl.int16))
    return tl.load(rows[:, None] + columns[None, :], mask=inside, other=0)


@triton.jit
def decode(words, HALF, BYTE, CODES: tl.constexpr, dtype: tl.constexpr):
    """Take a code out of each word: int8 and int4 as they are, e4m3 too small by 2 ** 8.

    The bits of e4m3, seven places up, are a float16 whose exponent is too small by 8.
    """
    if CODES.paired:
        assembly: tl.constexpr = CODES.assembly[2 * HALF + BYTE]
        bits = tl.inline_asm_elementwise(assembly, "=r,r", [words], tl.int16, True, 2)
        return bits.to(dtype, bitcast=True)
    if CODES.halves == 2:
        return (((words >> (8 * BYTE + 4 * HALF)) & 15) - 8).to(dtype)
    high = words << (8 - 8 * BYTE)
    if CODES.fp8:
        bits = (high & -0x8000) | ((high >> 1) & 0x3F80)
        return bits.to(tl.float16, bitcast=True).to(dtype)
    return (high >> 8).to(dtype)


@triton.jit
def channels_of(columns, HALF, BYTE, CODES: tl.constexpr):
    """Find the channel of a place in each word, and the line of the channel's group."""
    channels = HALF * (CODES.dim // 2) + columns * 2 + BYTE
    size: tl.constexpr = CODES.dim // CODES.groups
    return channels, channels // size - HALF * (CODES.dim // 2) // size


@triton.jit
def load_scales(scales, slots, stride, limit, CODES: tl.constexpr):
    """Load the scales of slots for each half, a line for each group."""
    HALVES: tl.constexpr = CODES.halves
    loaded = ()
    for half in tl.static_range(HALVES):
        first = half * (CODES.dim // 2) // (CODES.dim // CODES.groups)
        groups = first + tl.arange(0, CODES.lines)[:, None]
        there = (slots < limit)[None, :] & (groups < CODES.groups)
        places = slots.to(tl.int64)[None, :] * stride + groups
        loaded += (tl.load(scales + places, mask=there, other=0.0),)  # type: ignore[assignment]
    return loaded


@triton.jit(do_not_specialize=["slots", "split"])
def attend_codes_part_kernel(
    query,
    key,
    key_scales,
    value,
    value_scales,
    positions,
    constants,
    parts,
    key_heads,
    share,
    stored_share,
    slots,
    split,
    scale,
    softcap,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHARE_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attend to one part of the slots of a head by the queries that share it."""
    own = tl.program_id(0) % key_heads
    batch = (tl.program_id(0) // key_heads).to(tl.int64)
    part, count = tl.program_id(1), tl.num_programs(1)
    members = tl.arange(0, SHARE_WIDTH)
    real = members < share
    line = batch * key_heads * share + own * share + members
    own_query = of_head(query, batch, own * share)
    own_key, own_value = of_head(key, batch, own), of_head(value, batch, own)
    own_key_scales = of_head(key_scales, batch, own)
    own_value_scales = of_head(value_scales, batch, own)
    if positions is not None:
        held = of_head(positions, batch, own * share // stored_share)
    if constants is not None:
        added = tl.load(constants + line, mask=real, other=0.0).to(tl.float32)
    dtype: tl.constexpr = query[0].dtype.element_ty
    HALVES: tl.constexpr = KEY.halves
    ROWS: tl.constexpr = KEY.lines * SHARE_WIDTH
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, KEY.width)[None, :]
    tiles = ()
    for place in tl.static_range(2 * HALVES):
        channels, lines = channels_of(columns, place // 2, place % 2, KEY)
        there = (rows % SHARE_WIDTH < share) & (columns < KEY.words)
        there &= lines == rows // SHARE_WIDTH
        numbers = own_query + rows % SHARE_WIDTH * query[2] + channels
        tiles += (tl.load(numbers, mask=there, other=0.0),)  # type: ignore[assignment]

    highest = tl.full((SHARE_WIDTH,), float("-inf"), tl.float32)
    total = tl.zeros((SHARE_WIDTH,), tl.float32)
    seen = tl.zeros((KEYS,), tl.float32)
    VALUE_HALVES: tl.constexpr = VALUE.halves
    VALUE_ROWS: tl.constexpr = VALUE.lines * SHARE_WIDTH
    VALUE_WIDTH: tl.constexpr = VALUE.width
    means = ()
    for _ in tl.static_range(2 * VALUE_HALVES):
        means += (tl.zeros((VALUE_ROWS, VALUE_WIDTH), tl.float32),)  # type: ignore[assignment]
    stop = tl.minimum((part + 1) * split, slots)
    places = part * split + tl.arange(0, KEYS)
    next_key_scales = load_scales(own_key_scales, places, key_scales[3], stop, KEY)
    next_value_scales = load_scales(own_value_scales, places, value_scales[3], stop, VALUE)
    for _ in range(part * split, stop, KEYS):
        # scales are too narrow for Triton to load them ahead
        of_keys, of_values = next_key_scales, next_value_scales
        ahead = places + KEYS
        next_key_scales = load_scales(own_key_scales, ahead, key_scales[3], stop, KEY)
        next_value_scales = load_scales(own_value_scales, ahead, value_scales[3], stop, VALUE)
        stored = places < stop
        if positions is not None:
            stored = stored & (tl.load(held + places, mask=stored, other=-1) >= 0)
        words = load_words(own_key, places, key[3], stop, KEY)
        found = tl.zeros((SHARE_WIDTH, KEYS), tl.float32)
        for half in tl.static_range(HALVES):
            products = tl.zeros((ROWS, KEYS), tl.float32)
            for byte in tl.static_range(2):
                codes = tl.trans(decode(words, half, byte, KEY, dtype))
                products = tl.dot(tiles[2 * half + byte], codes, products, input_precision="ieee")
            products = tl.reshape(products, (KEY.lines, SHARE_WIDTH, KEYS))
            found += tl.sum(products * of_keys[half].to(tl.float32)[:, None, :], 0)
        found *= KEY.shift
        if constants is not None:
            # the sign of a zero counts, too; lines beyond the groups have none
            negative = tl.min(of_keys[0].to(tl.int16, bitcast=True).to(tl.int32), 0) < 0
            found += tl.where(negative[None, :], 0.0, added[:, None])
        found *= scale
        if softcap is not None:
            found = softcap * (1 - 2 / (tl.exp(2 * found / softcap) + 1))  # softcap * tanh
        found = tl.where(stored[None, :], found, float("-inf"))
        tl.store(
            parts.logits + line[:, None] * slots + places[None, :],
            found,
            mask=real[:, None] & (places < stop)[None, :],
        )
        highest, total, weights, shrink = softmax_step(found, highest, total)
        seen += stored.to(tl.float32)
        words = load_words(own_value, places, value[3], stop, VALUE)
        shrink = tl.broadcast_to(shrink[None, :], (VALUE.lines, SHARE_WIDTH))
        shrink = tl.reshape(shrink, (VALUE_ROWS, 1))
        updated = ()
        for half in tl.static_range(VALUE_HALVES):
            sizes = tl.where(stored[None, :], of_values[half].to(tl.float32) * VALUE.shift, 0.0)
            largest = 1.0
            if dtype == tl.float16:  # weights times small scales would fall below its range
                largest = tl.maximum(tl.max(sizes), _LEAST)
            scaled = weights[None, :, :] * (sizes / largest)[:, None, :]
            scaled = tl.reshape(scaled, (VALUE_ROWS, KEYS)).to(dtype)
            for byte in tl.static_range(2):
                codes = decode(words, half, byte, VALUE, dtype)
                mean = tl.dot(scaled, codes, input_precision="ieee") * largest
                updated += (means[2 * half + byte] * shrink + mean,)  # type: ignore[assignment]
        means = updated
        places = ahead

    columns = tl.arange(0, VALUE.width)
    for place in tl.static_range(2 * VALUE_HALVES):
        channels, lines = channels_of(columns, place // 2, place % 2, VALUE)
        of_line = tl.arange(0, VALUE.lines)[:, None] == lines[None, :]
        mean = tl.reshape(means[place], (VALUE.lines, SHARE_WIDTH, VALUE.width))
        tl.store(
            parts.mean + (line * count + part)[:, None] * VALUE.dim + channels[None, :],
            tl.sum(tl.where(of_line[:, None, :], mean, 0.0), 0),
            mask=real[:, None] & (columns < VALUE.words)[None, :],
        )
    line = line * count + part
    tl.store(parts.top + line, highest, mask=real)
    tl.store(parts.total + line, total, mask=real)
    tl.store(parts.seen + line, tl.zeros_like(total) + tl.sum(seen, 0), mask=real)


def attend_codes(
    query: Tensor,
    codes: Sequence[Tensor],
    positions: Tensor | None,
    sums: dict[str, Tensor],
    *,
    forms: tuple[str, str],
    value_dim: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    place: Tensor | None = None,
    weights: bool = False,
    constants: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend one query per batch entry over quantised slots, and count its weights in place.

    Args:
        query: (batch, heads, 1, head_dim), after RoPE, and rotated if the keys were.
        codes: codes and scales of keys, then of values, as `kvtool.maths.quantise` makes them:
            (batch, heads of the attention, slots, bytes) of int8 or uint8, and (.., 1 or dim / 32)
            float16. Views of larger buffers are read as they lie.
        positions: (batch, kv_heads, slots) int, -1 = empty slot; None: no slot is empty.
        sums: some of `COLUMNS` by name, (batch, kv_heads, slots) float32, laid out alike.
        forms: of the codes of keys and of values: int8, fp8 or int4.
        value_dim: channels of a value.
        constants: (batch, heads) float32, added to the products with centred keys, those whose
            scales have no sign; None: nothing is.
        scale, softcap, sinks, place, weights: as for `kvtool.kernels.attend_slots.attend_slots`.

    Returns:
        (batch, heads, 1, value_dim) in the dtype of the query, rotated if the values were, and the
        weights, (batch, heads, slots) float32, 0 in rows of padding; None if they are not asked
        for.
    """
    query = query[:, :, 0]
    batch, heads, head_dim = query.shape
    key_heads, slots = codes[0].shape[1:3]
    share = heads // key_heads
    parts, split = allocate_parts(query, slots, value_dim)
    layouts = [
        lay_out(forms[0], head_dim, codes[0], codes[1], query),
        lay_out(forms[1], value_dim, codes[2], codes[3], query),
    ]
    members = max(triton.next_power_of_2(share), _ROWS // max(each.lines for each in layouts))
    layouts = [each._replace(lines=max(each.lines, _ROWS // members)) for each in layouts]
    rows = members * layouts[1].lines
    if rows < 64:  # warps that share rows, fewer than they need, would all decode all codes
        layouts[1] = layouts[1]._replace(width=max(layouts[1].width, 2 * rows))
    with torch.cuda.device_of(query):
        attend_codes_part_kernel[(batch * key_heads, parts.top.shape[2])](
            *(strided(each) for each in (query, *codes, positions)),
            None if constants is None else constants.contiguous(),
            parts,
            key_heads,
            share,
            heads if positions is None else heads // positions.shape[1],
            slots,
            split,
            scale,
            softcap,
            KEY=layouts[0],
            VALUE=layouts[1],
            SHARE_WIDTH=members,
            KEYS=tile_edge(query, parts.mean, rows=members * max(each.lines for each in layouts)),
        )
    how: Any = {"sinks": sinks, "place": place, "weights": weights}
    return join_parts(parts, slots, query.dtype, sums, key_heads, **how)
