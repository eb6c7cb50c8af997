"""Attention of one query per row over the slots, and what it adds to the numbers beside them.

Two launches. The first splits the slots of a head among programs, so that a long cache keeps a GPU
busy at batch 1; each leaves its logits, their maximum, the sum of exponentials and the mean of its
values. The second joins the parts, and while it turns logits into weights adds them to the running
sums of the policy: nothing is read twice but the logits, which are small beside keys and values.
"""

import torch
from torch import Tensor

from kvtool.kernels.attend_part import attend_part_kernel
from kvtool.kernels.join_parts import allocate_parts, join_parts
from kvtool.kernels.tiles import dense, tile_edge, width


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
    """Attend one query per batch entry over the slots, and count its weights in place.

    Args:
        query: (batch, heads, 1, head_dim), after RoPE.
        key, value: (batch, heads of the attention, slots, dim).
        positions: (batch, kv_heads, slots) int, -1 = empty slot; None: no slot is empty.
        sums: some of `COLUMNS` by name, (batch, kv_heads, slots) float32, laid out alike.
        sinks: (batch, heads) logits that take their share without a value.
        valid: bool (batch,), False where the row's query is padding and counts for nothing.
        weights: whether the weights are wanted themselves.
        chosen: (batch, kv_heads or heads, count) int64, the slots to attend to, in any order; then
            `positions` are by place in these lists, -1 = nothing is read, and the sums and the
            weights have `count` in place of slots.

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
    parts = allocate_parts(query, slots, value_dim)
    stored = query if positions is None else dense(positions)
    listed = query if chosen is None else dense(chosen)
    with torch.cuda.device_of(query):
        attend_part_kernel[(batch * lists, parts.count)](
            query,
            key,
            value,
            stored,
            listed,
            parts.logits,
            parts.mean,
            *parts.numbers,
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
            MASKED=positions is not None,
            CHOSEN=chosen is not None,
        )
    return join_parts(
        parts, value.dtype, sums, key_heads, sinks=sinks, valid=valid, weights=weights
    )
