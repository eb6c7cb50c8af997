"""Attention of one query per row over the slots, and what it adds to the statistics beside them.

Two launches. The first splits the slots of a head among programs, so that a cache of a few hundred
slots keeps a GPU busy at batch 1. Each leaves its logits, their maximum, the sum of exponentials
and the mean of its values. The second joins the parts, and while it turns logits into weights adds
them to the running sums of the policy. Nothing is read twice but the logits, which are small beside
keys and values.

The first launch may also write the token that asks: the program whose part holds its slot uses its
key and value from registers, and stores them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtool.kernels.choose_slot import Choice, choose_by_values
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
from kvtool.maths.columns import COLUMNS


@triton.jit(do_not_specialize=["capacity", "slots", "split"])
def attend_part_kernel(
    query,
    key,
    value,
    positions,
    chosen,
    new_key,
    new_value,
    new_position,
    new_slot,
    attention_sum,
    square_sum,
    count,
    above_average,
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
    new_key_batch,
    new_key_head,
    new_value_batch,
    new_value_head,
    new_position_batch,
    sums_batch,
    sums_head,
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
    COUNTED: tl.constexpr,
    WRITES: tl.constexpr,
    APPENDS: tl.constexpr,
    ATTENTION_SUM: tl.constexpr,
    SQUARE_SUM: tl.constexpr,
    COUNT: tl.constexpr,
    ABOVE_AVERAGE: tl.constexpr,
):
    """Attend to one part of a list of slots by the queries that share the list.

    Where it writes, each head of keys has one list.
    """
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

    stop = tl.minimum((part + 1) * split, slots)
    if WRITES:
        slot = tl.load(new_slot + batch * lists + own)
        position = tl.load(new_position + batch * new_position_batch).to(tl.int32)
        head = own.to(tl.int64)
        columns, value_columns = tl.arange(0, DIM_WIDTH), tl.arange(0, VALUE_WIDTH)
        key_row_new = tl.load(
            new_key + batch * new_key_batch + head * new_key_head + columns,
            mask=columns < DIM,
            other=0.0,
        )
        value_row_new = tl.load(
            new_value + batch * new_value_batch + head * new_value_head + value_columns,
            mask=value_columns < VALUE_DIM,
            other=0.0,
        )
        if (slot >= part * split) & (slot < stop):
            tl.store(key + slot * key_row + columns, key_row_new, mask=columns < DIM)
            tl.store(
                value + slot * value_row + value_columns,
                value_row_new,
                mask=value_columns < VALUE_DIM,
            )
            tl.store(positions + slot, position)
            place = batch * sums_batch + head * sums_head + slot
            if ATTENTION_SUM:
                tl.store(attention_sum + place, 0.0)
            if SQUARE_SUM:
                tl.store(square_sum + place, 0.0)
            if COUNT:
                tl.store(count + place, 0.0)
            if ABOVE_AVERAGE:
                tl.store(above_average + place, 0.0)
        if APPENDS and not COUNTED:
            stop = tl.minimum(stop, slot.to(tl.int32) + 1)  # slots behind the new one are empty

    highest = tl.full((SHARE_WIDTH,), float("-inf"), tl.float32)
    total = tl.zeros((SHARE_WIDTH,), tl.float32)
    seen = tl.zeros((KEYS,), tl.float32)
    mean = tl.zeros((SHARE_WIDTH, VALUE_WIDTH), tl.float32)
    for low in range(part * split, stop, KEYS):
        places = low + tl.arange(0, KEYS)
        stored = places < stop
        if MASKED:
            held = tl.load(positions + places, mask=stored, other=-1)
            if WRITES:
                held = tl.where(stored & (places == slot), position, held)
            stored = stored & (held >= 0)
        if APPENDS:
            stored = stored & (places <= slot)
        rows = places
        if CHOSEN:
            rows = tl.load(chosen + places, mask=places < stop, other=capacity)
        limit = capacity if CHOSEN else stop
        keys = load_tile(key, rows, key_row, limit, DIM, DIM_WIDTH)
        if WRITES:
            keys = tl.where((places == slot)[:, None], key_row_new[None, :], keys)
        found = logits_of(tile, keys, scale, softcap, CAPPED)
        found = tl.where(stored[None, :], found, float("-inf"))
        if COUNTED:
            tl.store(
                logits + line[:, None] * slots + places[None, :],
                found,
                mask=(members < share)[:, None] & (places < stop)[None, :],
            )
        highest, total, weights, shrink = softmax_step(found, highest, total)
        seen += stored.to(tl.float32)
        values = load_tile(value, rows, value_row, limit, VALUE_DIM, VALUE_WIDTH)
        if WRITES:
            values = tl.where((places == slot)[:, None], value_row_new[None, :], values)
        mean = mean * shrink[:, None]
        mean += tl.dot(weights.to(values.dtype), values, input_precision="ieee")

    store_part(
        part_mean,
        part_top,
        part_total,
        part_seen,
        line * parts + part,
        members < share,
        tl.arange(0, VALUE_WIDTH),
        mean,
        highest,
        total,
        seen,
        VALUE_DIM,
        VALUE_WIDTH,
    )


class NewToken(NamedTuple):
    """A decoded token that attention also writes.

    Attributes:
        key, value: (batch, kv_heads, 1, dim).
        place: (batch or 1,) int64, its position; -1: an entry has padding instead.
        slot: (batch, kv_heads) int64, where it goes, contiguous. Where tokens are appended, all
            slots behind it are empty, and it is raised by one. With a choice, the slot that the
            next token takes is written there.
        appends: whether tokens are appended.
        choice: how the next slot is chosen; None: it is not.
    """

    key: Tensor
    value: Tensor
    place: Tensor
    slot: Tensor
    appends: bool
    choice: Choice | None = None


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
    masked: bool = True,
    new: NewToken | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend one query per batch entry over the slots, and count its weights in place.

    Args:
        query: (batch, heads, 1, head_dim), after RoPE.
        key, value: (batch, heads of the attention, slots, dim).
        positions: (batch, kv_heads, slots) int, -1 = empty slot; None: no slot is empty.
        sums: some of `COLUMNS` by name, (batch, kv_heads, slots) float32, laid out alike.
        sinks: (batch, heads) logits that take their share without a value.
        valid: bool (batch,), False where the row's query is padding and counts for nothing.
        weights: whether the weights are wanted themselves.
        chosen: (batch, kv_heads or heads, count) int64, the slots to attend to, in any order. Then
            `positions` are by place in these lists, -1 = nothing is read, and the sums and the
            weights have `count` in place of slots.
        masked: whether some of the slots may be empty, where `positions` are given.
        new: the token that asks, to be written before; then positions are given, and its place says
            where a row is padding.

    Returns:
        (batch, heads, 1, value_dim) in the dtype of the values, and the weights, (batch, heads,
        slots) float32, 0 in rows of padding; None if they are not asked for.
    """
    query, key, value = dense(query[:, :, 0]), dense(key), dense(value)
    batch, heads, head_dim = query.shape
    key_heads, capacity, value_dim = value.shape[1:]
    lists = key_heads if chosen is None else chosen.shape[1]
    slots = capacity if chosen is None else chosen.shape[2]
    share = heads // lists
    counted = bool(sums) or weights
    parts = allocate_parts(query, slots, value_dim, counted=counted)
    stored = query if positions is None else dense(positions)
    listed = query if chosen is None else dense(chosen)
    new_key, new_value, place = query, query, query
    if new is not None:
        new_key, new_value, place = dense(new.key), dense(new.value), new.place
    stride = next((total.stride() for total in sums.values()), (0, 0, 1))
    with torch.cuda.device_of(query):
        attend_part_kernel[(batch * lists, parts.count)](
            query,
            key,
            value,
            stored,
            listed,
            new_key,
            new_value,
            place,
            query if new is None else new.slot,
            *(sums.get(name, query) for name in COLUMNS),
            query if parts.logits is None else parts.logits,
            parts.mean,
            *parts.numbers,
            *query.stride()[:2],
            *key.stride()[:3],
            *value.stride()[:3],
            *stored.stride()[:2],
            *listed.stride()[:2],
            *new_key.stride()[:2],
            *new_value.stride()[:2],
            place.stride(0) if len(place) > 1 else 0,
            *stride[:2],
            lists,
            share,
            heads // key_heads,
            heads // stored.shape[1],
            capacity,
            slots,
            parts.split,
            scale,
            softcap or 1.0,
            DIM=head_dim,
            DIM_WIDTH=width(head_dim),
            VALUE_DIM=value_dim,
            VALUE_WIDTH=width(value_dim),
            SHARE_WIDTH=width(share),
            KEYS=tile_edge(key, value, rows=width(share)),
            CAPPED=softcap is not None,
            MASKED=positions is not None and masked,
            CHOSEN=chosen is not None,
            COUNTED=counted,
            WRITES=new is not None,
            APPENDS=new is not None and new.appends,
            **{name.upper(): name in sums for name in COLUMNS},
        )
    choice = None if new is None else new.choice
    by_values = choice is not None and choice.rescore != ""
    moves = new is not None and (new.appends or (choice is not None and not by_values))
    joined = join_parts(
        parts,
        value.dtype,
        sums,
        key_heads,
        sinks=sinks,
        valid=new.place if new is not None and masked else valid,
        weights=weights,
        slot=new.slot if new is not None and moves else None,
        positions=positions,
        choice=None if by_values else choice,
    )
    if new is not None and positions is not None and choice is not None and by_values:
        own = sums[choice.score]
        choose_by_values(own, value, positions, new.slot, choice, padded=masked)
    return joined
