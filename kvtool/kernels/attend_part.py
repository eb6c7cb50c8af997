"""First launch of attention over slots: the slots of a head, split among programs.

Each program leaves the logits of its part, their maximum, the sum of exponentials and the mean of
its values.
"""

import triton
import triton.language as tl

from kvtool.kernels.tiles import load_tile, logits_of, softmax_step, store_part


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
    """Attend to one part of a list of slots by the queries that share the list."""
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
        highest, total, weights, shrink = softmax_step(found, highest, total)
        seen += stored.to(tl.float32)
        values = load_tile(value, rows, value_row, limit, VALUE_DIM, VALUE_WIDTH)
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
