"""Second launch of attention over slots: joins the parts, and counts the weights meanwhile.

Where a policy's choice can be said in numbers (`Choice`), the same launch finds the slot that the
next token takes: one program of each head sees all of its slots then.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtool.kernels.choose_slot import Choice, lowest_slot
from kvtool.kernels.tiles import add_to, lay_out_sums, of_head, strided, width
from kvtool.maths.columns import COLUMNS, NEARLY_ONE

_SPLIT = 64  # slots that one program of the first launch reads, at least
_PARTS = 64  # at most
_KEYS = 128  # slots whose weights one program of the second launch finds at a time


@triton.jit
def joined_softmax(parts, sinks, line, part, count):
    """Join the softmax of the parts of one row: largest logit, sum, and the factor of each part."""
    tops = tl.load(parts.top + line * count + part, mask=part < count, other=float("-inf"))
    totals = tl.load(parts.total + line * count + part, mask=part < count, other=0.0)
    top = tl.max(tops, 0)
    if sinks is not None:
        sink = tl.load(sinks).to(tl.float32)
        top = tl.maximum(top, sink)
    shares = tl.exp(tops - top)
    total = tl.sum(totals * shares, 0)
    if sinks is not None:
        total += tl.exp(sink - top)
    return top, total, shares


@triton.jit(do_not_specialize=["slots", "count"])
def join_parts_kernel(
    parts,
    sinks,
    place,
    out,
    columns,
    sums_strides,
    positions,
    next_slot,
    choice,
    sums_heads,
    group,
    slots,
    count,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    PARTS_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    LEAST: tl.constexpr,
    RANKED: tl.constexpr,
):
    """Compute the weights of tiles of slots of one KV head, and with the first tile the output.

    A choice is made among all slots of a head, so that there is one tile of them.
    """
    own = tl.program_id(0) % sums_heads
    batch = (tl.program_id(0) // sums_heads).to(tl.int64)
    part = tl.arange(0, PARTS_WIDTH)
    channels = tl.arange(0, VALUE_WIDTH)
    counts = 1.0
    if place is not None:
        counts = (tl.load(place + batch) >= 0).to(tl.float32)
    sums_line = batch * sums_strides[0] + own.to(tl.int64) * sums_strides[1]
    if next_slot is not None:
        next_slot += batch * sums_heads + own
    stop = slots
    if parts.logits is None and choice is None:
        stop = 1
    for low in range(tl.program_id(1) * KEYS, stop, tl.num_programs(1) * KEYS):
        places = low + tl.arange(0, KEYS)
        there = places < slots
        mean = tl.zeros((KEYS,), tl.float32)
        stored = there
        seen = 0.0
        for member in range(group):
            head = own * group + member
            line = batch * sums_heads * group + head
            sink = None if sinks is None else sinks[0] + batch * sinks[1] + head
            top, total, shares = joined_softmax(parts, sink, line, part, count)
            seen = tl.load(parts.seen + line * count + part, mask=part < count, other=0.0)
            seen = tl.sum(seen, 0)
            if parts.logits is not None:
                logits = parts.logits + line * slots + places
                found = tl.load(logits, mask=there, other=float("-inf"))
                stored = there & (found > float("-inf"))
                weights = tl.exp(found - top) / total * counts
                mean += weights
                if WEIGHTS:
                    tl.store(logits, weights, mask=there)
            if low == 0:
                inside = channels < VALUE_DIM
                values = tl.load(
                    parts.mean + (line * count + part)[:, None] * VALUE_DIM + channels[None, :],
                    mask=(part < count)[:, None] & inside[None, :],
                    other=0.0,
                )
                joined = (tl.sum(values * shares[:, None], 0) / total).to(out.dtype.element_ty)
                tl.store(out + line * VALUE_DIM + channels, joined, mask=inside)
        mean = mean / group
        above = (mean * seen >= LEAST).to(tl.float32)
        added = (mean, mean * mean, stored.to(tl.float32) * counts, above)
        score = mean
        for i in tl.static_range(4):
            if columns[i] is not None:
                sums = add_to(columns[i], sums_line + places, added[i], there)
                if i == RANKED:
                    score = sums
        if choice is not None:
            held = tl.load(of_head(positions, batch, own) + places, mask=there, other=-1)
            if RANKED < 0:
                score = held.to(tl.float32)
            slot = lowest_slot(score, held, there, choice, batch, place is not None)
            tl.store(next_slot, slot)
    if next_slot is not None and choice is None and tl.program_id(1) == 0:
        tl.store(next_slot, tl.load(next_slot) + 1)


class Parts(NamedTuple):
    """What the first launch leaves to the second, in float32.

    Attributes:
        logits: (batch, heads, slots), -inf for an empty slot; None: nothing is counted.
        mean: (batch, heads, parts, value_dim), weighted values, not divided by the total.
        top, total, seen: of each part, (batch, heads, parts): the largest logit, the sum of
            exponentials and the count of stored slots.
    """

    logits: Tensor | None
    mean: Tensor
    top: Tensor
    total: Tensor
    seen: Tensor


def allocate_parts(
    query: Tensor, slots: int, value_dim: int, *, counted: bool = True
) -> tuple[Parts, int]:
    """Split the slots of a head among programs, and allocate what these leave.

    Args:
        query: (batch, heads, head_dim).
        counted: whether the weights of slots are asked for.

    Returns:
        What they leave, and the slots of a part.
    """
    batch, heads, _ = query.shape
    split = _SPLIT * triton.cdiv(slots, _SPLIT * _PARTS)
    parts = triton.cdiv(slots, split)
    new = partial(query.new_empty, dtype=torch.float32)
    logits = new((batch, heads, slots)) if counted else None
    mean, numbers = new((batch, heads, parts, value_dim)), new((3, batch, heads, parts))
    return Parts(logits, mean, *numbers.unbind()), split


def join_parts(
    parts: Parts,
    slots: int,
    dtype: torch.dtype,
    sums: dict[str, Tensor],
    kv_heads: int,
    *,
    sinks: Tensor | None,
    place: Tensor | None,
    weights: bool,
    slot: Tensor | None = None,
    positions: Tensor | None = None,
    choice: Choice | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Join the parts into the output, and count the weights in place.

    Args:
        slots: of all parts.
        dtype: of the output.
        sums: some of `COLUMNS` by name, (batch, heads that are counted, slots) float32.
        kv_heads: heads that the weights are averaged over where nothing is counted.
        sinks, place, weights: as for `kvtool.kernels.attend_slots.attend_slots`.
        slot: (batch, kv_heads) int64, which is raised by one, or set where there is a choice.
        positions: (batch, kv_heads, slots) int32, of which a choice is made.
        choice: how; None: none is made.

    Returns:
        (batch, heads, 1, value_dim), and the weights, (batch, heads, slots) float32, if wanted.
    """
    batch, heads, count, value_dim = parts.mean.shape
    out = parts.mean.new_empty((batch, heads, 1, value_dim), dtype=dtype)
    kv_heads = next((total.shape[1] for total in sums.values()), kv_heads)
    keys, tiles, ranked = _KEYS, triton.cdiv(slots, _KEYS) if sums or weights else 1, -1
    if choice is not None:
        keys, tiles = max(_KEYS, triton.next_power_of_2(slots)), 1
        ranked = COLUMNS.index(choice.score) if choice.score in COLUMNS else -1
    with torch.cuda.device_of(out):
        join_parts_kernel[(batch * kv_heads, tiles)](
            parts,
            strided(sinks),
            None if place is None else place.contiguous(),
            out,
            *lay_out_sums(sums),
            strided(positions),
            slot,
            None if choice is None else choice.numbers(),
            kv_heads,
            heads // kv_heads,
            slots,
            count,
            VALUE_DIM=value_dim,
            VALUE_WIDTH=width(value_dim),
            PARTS_WIDTH=triton.next_power_of_2(count),
            KEYS=keys,
            WEIGHTS=weights,
            LEAST=NEARLY_ONE,
            RANKED=ranked,
            num_warps=8 if keys > _KEYS else 4,
        )
    return out, parts.logits if weights else None
