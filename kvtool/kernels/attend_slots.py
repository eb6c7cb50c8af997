"""Attention of one query per row over the slots, and what it adds to the numbers beside them.

Two launches. The first splits the slots of a head among programs, so that a long cache keeps a GPU
busy at batch 1; each leaves its logits, their maximum, the sum of exponentials and the mean of its
values. The second joins the parts, and while it turns logits into weights adds them to the running
sums of the policy: nothing is read twice but the logits, which are small beside keys and values.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtool.kernels.tiles import dense, load_tile, logits_of, tile_edge, width
from kvtool.maths.columns import COLUMNS, NEARLY_ONE

_SPLIT = 512  # slots that one program reads, at least
_PARTS = 64  # at most
_KEYS = 128  # slots whose weights one program of the second launch finds


@triton.jit(do_not_specialize=["capacity", "slots", "split"])
def attend_part_kernel(
    query,
    key,
    value,
    positions,
    chosen,
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
    value_batch,
    value_head,
    value_row,
    stored_batch,
    stored_head,
    chosen_batch,
    chosen_head,
    lists,
    share,
    key_share,
    stored_share,
    capacity,
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
    CHOSEN: tl.constexpr,
):
    """The queries that attend to one list of slots, over one part of it."""
    own = tl.program_id(0) % lists
    batch = (tl.program_id(0) // lists).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    members = tl.arange(0, SHARE_WIDTH)
    heads = own * share + members
    line = batch * lists * share + heads
    key += batch * key_batch + (own * share // key_share).to(tl.int64) * key_head
    value += batch * value_batch + (own * share // key_share).to(tl.int64) * value_head
    chosen += batch * chosen_batch + own.to(tl.int64) * chosen_head
    query += batch * query_batch + own.to(tl.int64) * share * query_head
    tile = load_tile(query, members, query_head, share, DIM, DIM_WIDTH)
    positions += batch * stored_batch + (own * share // stored_share).to(tl.int64) * stored_head

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
        rows = places
        if CHOSEN:
            rows = tl.load(chosen + places, mask=places < stop, other=capacity)
        limit = capacity if CHOSEN else stop
        keys = load_tile(key, rows, key_row, limit, DIM, DIM_WIDTH)
        found = logits_of(tile, keys, scale, softcap, CAPPED)
        found = tl.where(stored[None, :], found, float("-inf"))
        tl.store(
            logits + line[:, None] * slots + places[None, :],
            found,
            mask=(members < share)[:, None] & (places < stop)[None, :],
        )
        top = tl.maximum(highest, tl.max(found, 1))
        finite = tl.where(top == float("-inf"), 0.0, top)  # nothing stored so far
        weights = tl.exp(found - finite[:, None])
        shrink = tl.exp(highest - finite)
        total = total * shrink + tl.sum(weights, 1)
        seen += stored.to(tl.float32)
        values = load_tile(value, rows, value_row, limit, VALUE_DIM, VALUE_WIDTH)
        mean = mean * shrink[:, None]
        mean += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        highest = top

    line = line * parts + part
    columns = tl.arange(0, VALUE_WIDTH)
    real = members < share
    tl.store(
        part_mean + line[:, None] * VALUE_DIM + columns[None, :],
        mean,
        mask=real[:, None] & (columns < VALUE_DIM)[None, :],
    )
    tl.store(part_top + line, highest, mask=real)
    tl.store(part_total + line, total, mask=real)
    tl.store(part_seen + line, tl.zeros((SHARE_WIDTH,), tl.float32) + tl.sum(seen, 0), mask=real)


@triton.jit(do_not_specialize=["slots", "parts"])
def join_parts_kernel(
    logits,
    part_mean,
    part_top,
    part_total,
    part_seen,
    sinks,
    valid,
    out,
    attention_sum,
    square_sum,
    count,
    above_average,
    sinks_batch,
    sums_batch,
    sums_head,
    sums_heads,
    group,
    slots,
    parts,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    PARTS_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    SINKS: tl.constexpr,
    RAGGED: tl.constexpr,
    WEIGHTS: tl.constexpr,
    ATTENTION_SUM: tl.constexpr,
    SQUARE_SUM: tl.constexpr,
    COUNT: tl.constexpr,
    ABOVE_AVERAGE: tl.constexpr,
    LEAST: tl.constexpr,
):
    """A tile of slots of one cached head: its weights, and with the first tile the output."""
    own = tl.program_id(0) % sums_heads
    batch = (tl.program_id(0) // sums_heads).to(tl.int64)
    places = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    there = places < slots
    part = tl.arange(0, PARTS_WIDTH)
    real = part < parts
    columns = tl.arange(0, VALUE_WIDTH)
    counts = 1.0
    if RAGGED:
        counts = tl.load(valid + batch).to(tl.float32)
    mean = tl.zeros((KEYS,), tl.float32)
    stored = there
    seen = 0.0
    for member in range(group):
        head = own * group + member
        line = batch * sums_heads * group + head
        tops = tl.load(part_top + line * parts + part, mask=real, other=float("-inf"))
        totals = tl.load(part_total + line * parts + part, mask=real, other=0.0)
        seen = tl.sum(tl.load(part_seen + line * parts + part, mask=real, other=0.0), 0)
        top = tl.max(tops, 0)
        if SINKS:
            sink = tl.load(sinks + batch * sinks_batch + head).to(tl.float32)
            top = tl.maximum(top, sink)
        shares = tl.exp(tops - top)
        total = tl.sum(totals * shares, 0)
        if SINKS:
            total += tl.exp(sink - top)
        found = tl.load(logits + line * slots + places, mask=there, other=float("-inf"))
        stored = there & (found > float("-inf"))
        weights = tl.exp(found - top) / total * counts
        mean += weights
        if WEIGHTS:
            tl.store(logits + line * slots + places, weights, mask=there)
        if tl.program_id(1) == 0:
            values = tl.load(
                part_mean + (line * parts + part)[:, None] * VALUE_DIM + columns[None, :],
                mask=real[:, None] & (columns < VALUE_DIM)[None, :],
                other=0.0,
            )
            joined = tl.sum(values * shares[:, None], 0) / total
            tl.store(
                out + line * VALUE_DIM + columns,
                joined.to(out.dtype.element_ty),
                mask=columns < VALUE_DIM,
            )
    mean = mean / group

    line = batch * sums_batch + own.to(tl.int64) * sums_head + places
    if ATTENTION_SUM:
        old = tl.load(attention_sum + line, mask=there, other=0.0)
        tl.store(attention_sum + line, old + mean, mask=there)
    if SQUARE_SUM:
        old = tl.load(square_sum + line, mask=there, other=0.0)
        tl.store(square_sum + line, old + mean * mean, mask=there)
    if COUNT:
        old = tl.load(count + line, mask=there, other=0.0)
        tl.store(count + line, old + stored.to(tl.float32) * counts, mask=there)
    if ABOVE_AVERAGE:
        old = tl.load(above_average + line, mask=there, other=0.0)
        above = (mean * seen >= LEAST).to(tl.float32)
        tl.store(above_average + line, old + above, mask=there)


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
    """Attention of one query per row, counted in place.

    Args:
        query: (batch, heads, 1, head_dim), after RoPE.
        key, value: (batch, heads of the attention, slots, dim).
        positions: (batch, kv_heads, slots) int, -1 = empty slot; None: no slot is empty.
        sums: some of `COLUMNS` by name, (batch, kv_heads, slots) float32, laid out alike.
        sinks: (batch, heads) logits that take their share without a value.
        valid: bool (batch,), False where the row's query is padding and counts for nothing.
        weights: whether the weights are wanted themselves.
        chosen: (batch, kv_heads or heads, count) int64, the slots to attend to, in any order; then
            there are no `positions`, and the sums and the weights have `count` in place of slots.

    Returns:
        (batch, heads, 1, value_dim) in the dtype of the values, and the weights, (batch, heads,
        slots) float32, 0 in rows of padding; None if nobody wants them.
    """
    query, key, value = dense(query[:, :, 0]), dense(key), dense(value)
    batch, heads, head_dim = query.shape
    key_heads, capacity, value_dim = value.shape[1:]
    lists = key_heads if chosen is None else chosen.shape[1]
    slots = capacity if chosen is None else chosen.shape[2]
    share = heads // lists
    split = max(_SPLIT, triton.cdiv(slots, _PARTS))
    parts = triton.cdiv(slots, split)
    floats = {"dtype": torch.float32, "device": query.device}
    logits = torch.empty((batch, heads, slots), **floats)
    part_mean = torch.empty((batch, heads, parts, value_dim), **floats)
    part_numbers = torch.empty((3, batch, heads, parts), **floats).unbind()
    stored = query if positions is None else dense(positions)
    listed = query if chosen is None else dense(chosen)
    with torch.cuda.device_of(query):
        attend_part_kernel[(batch * lists, parts)](
            query,
            key,
            value,
            stored,
            listed,
            logits,
            part_mean,
            *part_numbers,
            *query.stride()[:2],
            *key.stride()[:3],
            *value.stride()[:3],
            *stored.stride()[:2],
            *listed.stride()[:2],
            lists,
            share,
            heads // key_heads,
            heads // stored.shape[1],
            capacity,
            slots,
            split,
            scale,
            softcap or 1.0,
            DIM=head_dim,
            DIM_WIDTH=width(head_dim),
            VALUE_DIM=value_dim,
            VALUE_WIDTH=width(value_dim),
            SHARE_WIDTH=width(share),
            KEYS=tile_edge(key, value, rows=width(share)),
            CAPPED=softcap is not None,
            MASKED=positions is not None,
            CHOSEN=chosen is not None,
        )
    out = value.new_empty((batch, heads, 1, value_dim))
    strides = {total.stride() for total in sums.values()} or {(0, 0, 1)}
    (stride,) = strides  # alike, or this raises
    sums_heads = next((total.shape[1] for total in sums.values()), key_heads)
    tiles = triton.cdiv(slots, _KEYS) if sums or weights else 1
    with torch.cuda.device_of(query):
        join_parts_kernel[(batch * sums_heads, tiles)](
            logits,
            part_mean,
            *part_numbers,
            query if sinks is None else sinks,
            query if valid is None else valid.to(torch.int32),
            out,
            *(sums.get(name, out) for name in COLUMNS),
            0 if sinks is None else sinks.stride(0),
            *stride[:2],
            sums_heads,
            heads // sums_heads,
            slots,
            parts,
            VALUE_DIM=value_dim,
            VALUE_WIDTH=width(value_dim),
            PARTS_WIDTH=triton.next_power_of_2(parts),
            KEYS=_KEYS,
            SINKS=sinks is not None,
            RAGGED=valid is not None,
            WEIGHTS=weights,
            **{name.upper(): name in sums for name in COLUMNS},
            LEAST=NEARLY_ONE,
        )
    return out, logits if weights else None
