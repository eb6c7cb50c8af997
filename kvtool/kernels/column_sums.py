"""Columns of attention, summed over many queries, from the log-sum-exp: weights are not written.

The weight of a key is exp(logit - log-sum-exp of its query). A program owns a tile of keys and
walks over the queries that can see them. So nothing is added up by two programs, and the sums do
not depend on the order in which programs run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtool.kernels.tiles import (
    LOG2_E,
    add_to,
    dense,
    load_tile,
    logits_of,
    tile_edge,
    visible_tile,
    width,
)
from kvtool.maths.columns import COLUMNS, NEARLY_ONE


@triton.jit(do_not_specialize=["q_len", "kv_len", "window"])
def column_sums_kernel(
    query,
    key,
    query_positions,
    key_positions,
    lse,
    seen,
    attention_sum,
    square_sum,
    count,
    above_average,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_row,
    new_batch,
    stored_batch,
    stored_head,
    sums_batch,
    sums_head,
    sums_heads,
    group,
    key_share,
    stored_share,
    q_len,
    kv_len,
    window,
    scale,
    softcap,
    DIM: tl.constexpr,
    DIM_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    ATTENTION_SUM: tl.constexpr,
    SQUARE_SUM: tl.constexpr,
    COUNT: tl.constexpr,
    ABOVE_AVERAGE: tl.constexpr,
    LEAST: tl.constexpr,
    ONE_KEY_HEAD: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    """Sum what a tile of keys receives from all queries that see it, the mean over a group."""
    tiles = tl.cdiv(kv_len, KEYS)
    low = tl.program_id(0) % tiles * KEYS
    own = tl.program_id(0) // tiles % sums_heads
    batch = (tl.program_id(0) // tiles // sums_heads).to(tl.int64)
    heads = sums_heads * group
    places = low + tl.arange(0, KEYS)
    there = places < kv_len
    key_positions += batch * stored_batch + (own * group // stored_share).to(tl.int64) * stored_head
    stored = tl.load(key_positions + places, mask=there, other=-1).to(tl.int32)

    if ONE_KEY_HEAD:
        shared = (own * group // key_share).to(tl.int64)
        keys = load_tile(
            key + batch * key_batch + shared * key_head, places, key_row, kv_len, DIM, DIM_WIDTH
        )
    sums = tl.zeros((KEYS,), tl.float32)
    squares = tl.zeros((KEYS,), tl.float32)
    counted = tl.zeros((KEYS,), tl.float32)
    above = tl.zeros((KEYS,), tl.float32)
    earliest = tl.maximum(low - (kv_len - q_len), 0) // ROWS * ROWS
    for first in range(earliest, q_len, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = rows < q_len
        new = tl.load(query_positions + batch * new_batch + rows, mask=inside, other=-1)
        new = new.to(tl.int32)
        visible = visible_tile(new, stored, window, WINDOWED)
        visible = visible & (new >= 0)[:, None] & there[None, :]
        mean = tl.zeros((ROWS, KEYS), tl.float32)
        for member in range(group):
            head = own * group + member
            line = (batch * heads + head) * q_len + rows
            own_query = query + batch * query_batch + head.to(tl.int64) * query_head
            tile = load_tile(own_query, rows, query_row, q_len, DIM, DIM_WIDTH)
            if not ONE_KEY_HEAD:
                own_key = key + batch * key_batch + (head // key_share).to(tl.int64) * key_head
                keys = load_tile(own_key, places, key_row, kv_len, DIM, DIM_WIDTH)
            logits = logits_of(tile, keys, scale, softcap, CAPPED)
            norm = tl.load(lse + line, mask=inside, other=0.0)
            exponent = (logits - norm[:, None]) * LOG2_E
            mean += tl.exp2(tl.where(visible, exponent, float("-inf")))
        mean = mean / group
        if ATTENTION_SUM:
            sums += tl.sum(mean, 0)
        if SQUARE_SUM:
            squares += tl.sum(mean * mean, 0)
        if COUNT:
            counted += tl.sum(visible.to(tl.float32), 0)
        if ABOVE_AVERAGE:
            line = (batch * heads + own * group) * q_len + rows
            keys_seen = tl.load(seen + line, mask=inside, other=0.0)
            above += tl.sum((mean * keys_seen[:, None] >= LEAST).to(tl.float32), 0)

    line = batch * sums_batch + own.to(tl.int64) * sums_head + places
    if ATTENTION_SUM:
        add_to(attention_sum, line, sums, there)
    if SQUARE_SUM:
        add_to(square_sum, line, squares, there)
    if COUNT:
        add_to(count, line, counted, there)
    if ABOVE_AVERAGE:
        add_to(above_average, line, above, there)


def column_sums(
    query: Tensor,
    key: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    lse: Tensor,
    seen: Tensor | None,
    sums: dict[str, Tensor],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Add to each slot what it receives from the newest tokens, in place.

    Args:
        query, key, query_positions, key_positions: as `attend_rows` took them.
        lse, seen: what it returned beside the output; the second for `above_average` alone.
        sums: some of `COLUMNS` by name, (batch, their heads, kv_len) float32, laid out alike; each
            of their heads takes the mean over an equal share of the query heads.
    """
    query, key = dense(query), dense(key)
    query_positions, key_positions = dense(query_positions), dense(key_positions)
    batch, heads, q_len, head_dim = query.shape
    kv_len = key.shape[2]
    (stride,) = {total.stride() for total in sums.values()}  # alike, or this raises
    sums_heads = next(iter(sums.values())).shape[1]
    edge = tile_edge(key)
    with torch.cuda.device_of(query):
        column_sums_kernel[(triton.cdiv(kv_len, edge) * batch * sums_heads,)](
            query,
            key,
            query_positions,
            key_positions,
            lse,
            lse if seen is None else seen,
            *(sums.get(name, lse) for name in COLUMNS),
            *query.stride()[:3],
            *key.stride()[:3],
            query_positions.stride(0),
            *key_positions.stride()[:2],
            *stride[:2],
            sums_heads,
            heads // sums_heads,
            heads // key.shape[1],
            heads // key_positions.shape[1],
            q_len,
            kv_len,
            window or 0,
            scale,
            softcap or 1.0,
            DIM=head_dim,
            DIM_WIDTH=width(head_dim),
            ROWS=edge,
            KEYS=edge,
            CAPPED=softcap is not None,
            WINDOWED=window is not None,
            **{name.upper(): name in sums for name in COLUMNS},
            LEAST=NEARLY_ONE,
            ONE_KEY_HEAD=heads // key.shape[1] % (heads // sums_heads) == 0,
            LOG2_E=LOG2_E,
            num_stages=2,
        )
