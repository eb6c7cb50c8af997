"""Attention of many queries, with the log-sum-exp of each and the number of keys that it sees.

One pass over the keys with a running maximum (Dao et al., 2022, https://arxiv.org/abs/2205.14135).
The masks are those of a slot cache: by true position, -1 = empty or padding. A tile of keys that
all queries see is not masked. The log-sum-exp is what `column_sums` needs to find the weights again
without their having been written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtool.kernels.tiles import (
    LOG2_E,
    load_tile,
    logits_of,
    of_head,
    prompt_tiling,
    strided,
    visible_tile,
    width,
)


@triton.jit(do_not_specialize=["q_len", "kv_len", "window"])
def attend_rows_kernel(
    query,
    key,
    value,
    query_positions,
    key_positions,
    lowest,
    latest,
    sinks,
    out,
    lse,
    seen,
    full_tiles,
    heads,
    key_share,
    stored_share,
    q_len,
    kv_len,
    window,
    scale,
    softcap,
    DIM: tl.constexpr,
    DIM_WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    IN_ORDER: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    """Attend a tile of queries of one head over all keys that they can see."""
    tiles = tl.cdiv(q_len, ROWS)
    first = tl.program_id(0) % tiles * ROWS
    own = tl.program_id(0) // tiles
    head = own % heads
    batch = (own // heads).to(tl.int64)
    rows = first + tl.arange(0, ROWS)
    inside = rows < q_len
    own_key = of_head(key, batch, head // key_share)
    own_value = of_head(value, batch, head // key_share)
    own_positions = of_head(key_positions, batch, head // stored_share)
    lines = (batch * (heads // stored_share) + head // stored_share) * full_tiles
    tile = load_tile(of_head(query, batch, head), rows, query[3], q_len, DIM, DIM_WIDTH)
    new = query_positions[0] + batch * query_positions[1] + rows
    new = tl.load(new, mask=inside, other=-1).to(tl.int32)
    oldest = tl.min(tl.where(inside, new, 2147483647), 0)  # -1 where one is padding
    newest = tl.max(new, 0)

    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    keys_seen = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
    start = 0
    stop = tl.minimum(kv_len - q_len + first + ROWS, kv_len)
    if window is not None and IN_ORDER:
        start = tl.maximum(kv_len - q_len + first - window + 1, 0) // KEYS * KEYS
    for low in range(start, stop, KEYS):
        places = low + tl.arange(0, KEYS)
        keys = load_tile(own_key, places, key[3], stop, DIM, DIM_WIDTH)
        logits = logits_of(tile, keys, scale, softcap) * LOG2_E
        whole = low + KEYS <= stop
        first_of_tile = tl.load(lowest + lines + low // KEYS, mask=whole, other=-1)
        last_of_tile = tl.load(latest + lines + low // KEYS, mask=whole, other=-1)
        masked = (first_of_tile < 0) | (last_of_tile > oldest)
        if window is not None:
            masked = masked | (first_of_tile <= newest - window)
        if masked:
            there = places < stop
            stored = tl.load(own_positions + places, mask=there, other=-1).to(tl.int32)
            visible = visible_tile(new, stored, window) & there[None, :]
            logits = tl.where(visible, logits, float("-inf"))
            if seen is not None:
                keys_seen += tl.sum(visible.to(tl.float32), 1)
        else:
            if seen is not None:
                keys_seen += KEYS
        top = tl.maximum(highest, tl.max(logits, 1))
        finite = tl.where(top == float("-inf"), 0.0, top)  # nothing visible so far
        weights = tl.exp2(logits - finite[:, None])
        shrink = tl.exp2(highest - finite)
        highest = top
        total = total * shrink + tl.sum(weights, 1)
        values = load_tile(own_value, places, value[3], stop, VALUE_DIM, VALUE_WIDTH)
        mean = mean * shrink[:, None]
        mean = tl.dot(weights.to(values.dtype), values, mean, input_precision="ieee")
    if sinks is not None:
        sink = tl.load(sinks[0] + batch * sinks[1] + head).to(tl.float32) * LOG2_E
        top = tl.maximum(highest, sink)
        shrink = tl.exp2(highest - top)
        total = total * shrink + tl.exp2(sink - top)
        mean = mean * shrink[:, None]
        highest = top

    line = own.to(tl.int64) * q_len + rows
    columns = tl.arange(0, VALUE_WIDTH)
    tl.store(
        out + line[:, None] * VALUE_DIM + columns[None, :],
        (mean / total[:, None]).to(out.dtype.element_ty),
        mask=inside[:, None] & (columns < VALUE_DIM)[None, :],
    )
    tl.store(lse + line, (highest + tl.log2(total)) / LOG2_E, mask=inside)
    if seen is not None:
        tl.store(seen + line, keys_seen, mask=inside)


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    in_order: bool = False,
    counted: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend the newest tokens over [kept slots, new tokens].

    Args:
        query: (batch, heads, q_len, head_dim), after RoPE.
        key, value: (batch, heads of the attention, kv_len, dim); the last q_len are the new tokens.
        query_positions: (batch, q_len) int64 ascending, -1 = padding, whose output means nothing.
        key_positions: (batch, kv_heads, kv_len) int, -1 = empty slot or padding.
        window: width of a sliding window, in positions, the query itself included.
        sinks: (batch, heads) logits that take their share without a value.
        in_order: whether key j has position j, so that a window need not look far back.
        counted: whether the number of keys that each query sees is wanted, which takes time.

    Returns:
        (batch, heads, q_len, value_dim) in the dtype of the values; the log-sum-exp of the logits
        of each query, its sink included, and the number of keys that it sees (None: not counted),
        (batch, heads, q_len) float32.
    """
    batch, heads, q_len, head_dim = query.shape
    kv_len, value_dim = value.shape[2:]
    out = value.new_empty((batch, heads, q_len, value_dim))
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=query.device)
    seen = torch.empty_like(lse) if counted else None
    tiling = prompt_tiling(key, value)
    whole = key_positions[..., : kv_len // tiling.keys * tiling.keys]
    lowest, latest = whole.unflatten(-1, (-1, tiling.keys)).aminmax(dim=-1)
    with torch.cuda.device_of(query):
        attend_rows_kernel[(triton.cdiv(q_len, tiling.rows) * batch * heads,)](
            *(strided(each) for each in (query, key, value, query_positions, key_positions)),
            lowest,
            latest,
            strided(sinks),
            out,
            lse,
            seen,
            kv_len // tiling.keys,
            heads,
            heads // key.shape[1],
            heads // key_positions.shape[1],
            q_len,
            kv_len,
            window,
            scale,
            softcap,
            DIM=head_dim,
            DIM_WIDTH=width(head_dim),
            VALUE_DIM=value_dim,
            VALUE_WIDTH=width(value_dim),
            ROWS=tiling.rows,
            KEYS=tiling.keys,
            IN_ORDER=in_order,
            LOG2_E=LOG2_E,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )
    return out, lse, seen
