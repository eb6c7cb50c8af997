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
    lay_out_sums,
    load_tile,
    logits_of,
    of_head,
    strided,
    tile_edge,
    visible_tile,
    width,
)
from kvtool.maths.columns import NEARLY_ONE


@triton.jit(do_not_specialize=["q_len", "kv_len", "window"])
def column_sums_kernel(
    query,
    key,
    query_positions,
    key_positions,
    lse,
    seen,
    columns,
    sums_strides,
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
    stored = of_head(key_positions, batch, own * group // stored_share) + places
    stored = tl.load(stored, mask=there, other=-1).to(tl.int32)

    if ONE_KEY_HEAD:
        shared = of_head(key, batch, own * group // key_share)
        keys = load_tile(shared, places, key[3], kv_len, DIM, DIM_WIDTH)
    sums = tl.zeros((KEYS,), tl.float32)
    squares = tl.zeros((KEYS,), tl.float32)
    counted = tl.zeros((KEYS,), tl.float32)
    above = tl.zeros((KEYS,), tl.float32)
    earliest = tl.maximum(low - (kv_len - q_len), 0) // ROWS * ROWS
    for first in range(earliest, q_len, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = rows < q_len
        new = query_positions[0] + batch * query_positions[1] + rows
        new = tl.load(new, mask=inside, other=-1).to(tl.int32)
        visible = visible_tile(new, stored, window)
        visible = visible & (new >= 0)[:, None] & there[None, :]
        mean = tl.zeros((ROWS, KEYS), tl.float32)
        for member in range(group):
            head = own * group + member
            line = (batch * heads + head) * q_len + rows
            own_query = of_head(query, batch, head)
            tile = load_tile(own_query, rows, query[3], q_len, DIM, DIM_WIDTH)
            if not ONE_KEY_HEAD:
                own_key = of_head(key, batch, head // key_share)
                keys = load_tile(own_key, places, key[3], kv_len, DIM, DIM_WIDTH)
            logits = logits_of(tile, keys, scale, softcap)
            norm = tl.load(lse + line, mask=inside, other=0.0)
            exponent = (logits - norm[:, None]) * LOG2_E
            mean += tl.exp2(tl.where(visible, exponent, float("-inf")))
        mean = mean / group
        if columns[0] is not None:
            sums += tl.sum(mean, 0)
        if columns[1] is not None:
            squares += tl.sum(mean * mean, 0)
        if columns[2] is not None:
            counted += tl.sum(visible.to(tl.float32), 0)
        if columns[3] is not None:
            line = (batch * heads + own * group) * q_len + rows
            keys_seen = tl.load(seen + line, mask=inside, other=0.0)
            above += tl.sum((mean * keys_seen[:, None] >= LEAST).to(tl.float32), 0)

    line = batch * sums_strides[0] + own.to(tl.int64) * sums_strides[1] + places
    added = (sums, squares, counted, above)
    for i in tl.static_range(4):
        if columns[i] is not None:
            add_to(columns[i], line, added[i], there)


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
    batch, heads, q_len, head_dim = query.shape
    kv_len = key.shape[2]
    sums_heads = next(iter(sums.values())).shape[1]
    edge = tile_edge(key)
    with torch.cuda.device_of(query):
        column_sums_kernel[(triton.cdiv(kv_len, edge) * batch * sums_heads,)](
            *(strided(each) for each in (query, key, query_positions, key_positions)),
            lse,
            seen,
            *lay_out_sums(sums),
            sums_heads,
            heads // sums_heads,
            heads // key.shape[1],
            heads // key_positions.shape[1],
            q_len,
            kv_len,
            window,
            scale,
            softcap,
            DIM=head_dim,
            DIM_WIDTH=width(head_dim),
            ROWS=edge,
            KEYS=edge,
            LEAST=NEARLY_ONE,
            ONE_KEY_HEAD=heads // key.shape[1] % (heads // sums_heads) == 0,
            LOG2_E=LOG2_E,
            num_stages=2,
        )
