"""Attention of one query per row over the slots, and what it adds to the statistics beside them.

The first of two launches splits the slots of a head among programs, so that a cache of a few
hundred slots keeps a GPU busy at batch 1. It may also write the token that asks: the program whose
part holds its slot uses its key and value from registers, and stores them. `join_parts` is the
second launch. Only logits are read twice, which are small beside keys and values.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtool.kernels.choose_slot import Choice, choose_by_values
from kvtool.kernels.join_parts import allocate_parts, join_parts
from kvtool.kernels.tiles import (
    lay_out_sums,
    load_tile,
    logits_of,
    of_head,
    softmax_step,
    strided,
    tile_edge,
    width,
)


@triton.jit(do_not_specialize=["capacity", "slots", "split"])
def attend_part_kernel(
    query,
    key,
    value,
    positions,
    chosen,
    new_key,
    new_value,
    place,
    slot,
    columns,
    sums_strides,
    parts,
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
    MASKED: tl.constexpr,
    APPENDS: tl.constexpr,
):
    """Attend to one part of a list of slots by the queries that share the list.

    Where it writes, each head of keys has one list.
    """
    own = tl.program_id(0) % lists
    batch = (tl.program_id(0) // lists).to(tl.int64)
    part, count = tl.program_id(1), tl.num_programs(1)
    members, channels = tl.arange(0, SHARE_WIDTH), tl.arange(0, DIM_WIDTH)
    value_channels = tl.arange(0, VALUE_WIDTH)
    line = batch * lists * share + own * share + members
    tile = load_tile(of_head(query, batch, own * share), members, query[2], share, DIM, DIM_WIDTH)
    keys_of_head = of_head(key, batch, own * share // key_share)
    values_of_head = of_head(value, batch, own * share // key_share)
    if positions is not None:
        held_of_head = of_head(positions, batch, own * share // stored_share)

    stop = tl.minimum((part + 1) * split, slots)
    if slot is not None:
        at = tl.load(slot + batch * lists + own)
        inside, value_inside = channels < DIM, value_channels < VALUE_DIM
        own_key = tl.load(of_head(new_key, batch, own) + channels, mask=inside, other=0.0)
        own_value = of_head(new_value, batch, own) + value_channels
        own_value = tl.load(own_value, mask=value_inside, other=0.0)
        position = tl.load(place[0] + batch * place[1]).to(tl.int32)
        if (at >= part * split) & (at < stop):
            tl.store(keys_of_head + at * key[3] + channels, own_key, mask=inside)
            tl.store(values_of_head + at * value[3] + value_channels, own_value, mask=value_inside)
            tl.store(held_of_head + at, position)
            sums_line = batch * sums_strides[0] + own.to(tl.int64) * sums_strides[1] + at
            for i in tl.static_range(len(columns)):
                if columns[i] is not None:
                    tl.store(columns[i] + sums_line, 0.0)
        if APPENDS and parts.logits is None:
            stop = tl.minimum(stop, at.to(tl.int32) + 1)  # slots behind the new one are empty

    highest = tl.full((SHARE_WIDTH,), float("-inf"), tl.float32)
    total = tl.zeros((SHARE_WIDTH,), tl.float32)
    seen = tl.zeros((KEYS,), tl.float32)
    mean = tl.zeros((SHARE_WIDTH, VALUE_WIDTH), tl.float32)
    for low in range(part * split, stop, KEYS):
        places = low + tl.arange(0, KEYS)
        stored = places < stop
        if MASKED:
            held = tl.load(held_of_head + places, mask=stored, other=-1)
            if slot is not None:
                held = tl.where(stored & (places == at), position, held)
            stored = stored & (held >= 0)
        if APPENDS:
            stored = stored & (places <= at)
        rows, limit = places, stop
        if chosen is not None:
            rows = of_head(chosen, batch, own) + places
            rows, limit = tl.load(rows, mask=places < stop, other=capacity), capacity
        keys = load_tile(keys_of_head, rows, key[3], limit, DIM, DIM_WIDTH)
        if slot is not None:
            keys = tl.where((places == at)[:, None], own_key[None, :], keys)
        found = logits_of(tile, keys, scale, softcap)
        found = tl.where(stored[None, :], found, float("-inf"))
        if parts.logits is not None:
            tl.store(
                parts.logits + line[:, None] * slots + places[None, :],
                found,
                mask=(members < share)[:, None] & (places < stop)[None, :],
            )
        highest, total, weights, shrink = softmax_step(found, highest, total)
        seen += stored.to(tl.float32)
        values = load_tile(values_of_head, rows, value[3], limit, VALUE_DIM, VALUE_WIDTH)
        if slot is not None:
            values = tl.where((places == at)[:, None], own_value[None, :], values)
        mean = mean * shrink[:, None]
        mean += tl.dot(weights.to(values.dtype), values, input_precision="ieee")

    real, line = members < share, line * count + part
    tl.store(
        parts.mean + line[:, None] * VALUE_DIM + value_channels[None, :],
        mean,
        mask=real[:, None] & (value_channels < VALUE_DIM)[None, :],
    )
    tl.store(parts.top + line, highest, mask=real)
    tl.store(parts.total + line, total, mask=real)
    tl.store(parts.seen + line, tl.zeros_like(total) + tl.sum(seen, 0), mask=real)


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
    place: Tensor | None = None,
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
        place: (batch,) int64, below 0 where the row's query is padding and counts for nothing.
        weights: whether the weights are wanted themselves.
        chosen: (batch, kv_heads or heads, count) int64, the slots to attend to, in any order. Then
            `positions` are by place in these lists, -1 = nothing is read, and the sums and the
            weights have `count` in place of slots.
        masked: whether some of the slots may be empty, where `positions` are given.
        new: the token that asks, to be written before, whose place takes the other's.

    Returns:
        (batch, heads, 1, value_dim) in the dtype of the values, and the weights, (batch, heads,
        slots) float32, 0 in rows of padding; None if they are not asked for.
    """
    query = query[:, :, 0]
    batch, heads, head_dim = query.shape
    key_heads, capacity, value_dim = value.shape[1:]
    lists, slots = (key_heads, capacity) if chosen is None else chosen.shape[1:]
    share = heads // lists
    parts, split = allocate_parts(query, slots, value_dim, counted=bool(sums) or weights)
    written: tuple[Any, ...] = (None,) * 4
    if new is not None:
        stride = new.place.stride(0) if len(new.place) > 1 else 0
        written = strided(new.key), strided(new.value), (new.place, stride), new.slot
    with torch.cuda.device_of(query):
        attend_part_kernel[(batch * lists, parts.top.shape[2])](
            *(strided(each) for each in (query, key, value, positions, chosen)),
            *written,
            *lay_out_sums(sums),
            parts,
            lists,
            share,
            heads // key_heads,
            heads if positions is None else heads // positions.shape[1],
            capacity,
            slots,
            split,
            scale,
            softcap,
            DIM=head_dim,
            DIM_WIDTH=width(head_dim),
            VALUE_DIM=value_dim,
            VALUE_WIDTH=width(value_dim),
            SHARE_WIDTH=width(share),
            KEYS=tile_edge(key, value, rows=width(share)),
            MASKED=positions is not None and masked,
            APPENDS=new is not None and new.appends,
        )
    how: dict[str, Any] = {"sinks": sinks, "weights": weights}
    choice = None
    if new is not None:
        choice, place = new.choice, new.place if masked else None
        if choice is not None and not choice.by_values:
            how |= {"choice": choice, "positions": positions, "slot": new.slot}
        elif new.appends:
            how["slot"] = new.slot
    joined = join_parts(parts, slots, value.dtype, sums, key_heads, place=place, **how)
    if new is not None and positions is not None and choice is not None and choice.by_values:
        choose_by_values(sums[choice.score], value, positions, new.slot, choice, padded=masked)
    return joined
