"""Attention of a whole prompt by the fused kernel of a CPU, and the columns from its log-sum-exp.

What it computes is what `explicit_block` and the policy's `observe` compute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.cache.steps.block import Block, deferred
from kvtool.cache.steps.call import Call
from kvtool.cache.storage.layer import SlotLayer
from kvtool.maths.causal_columns import add_causal_columns
from kvtool.maths.fused import can_fuse, fused_attention
from kvtool.sizes import LONG_PROMPT


def returns_norms(layer: SlotLayer, call: Call, block: Block) -> bool:
    """Whether the fused kernel can attend the block, and tell the log-sum-exp of its rows.

    It has to be the beginning of a prompt that sees all before it, with padding at the ends only,
    and long: weights from a log-sum-exp are off by the rounding of large logits (1e-5 of a weight),
    which tells tokens apart that tie exactly where weights are computed in full. In short prompts
    ties are likely, and no time is to be gained.
    """
    query, key, value = call.query, call.key, call.value
    if call.q_len < LONG_PROMPT:
        return False
    plain = not (call.needs_weights or layer.chunked or call.spans is not None)
    if not plain or layer.window is not None or block.kept:
        return False
    if not can_fuse(query, key, value) or key.shape[1] != layer.slots.kv_heads:
        return False
    return not layer.padded or all(
        own.stop - own.start >= LONG_PROMPT and bool((block.new[row, own] >= 0).all())
        for row, own in enumerate(_token_columns(block.new))
    )


def can_sum(layer: SlotLayer, call: Call, block: Block) -> bool:
    """Whether that is all the policy needs."""
    return not layer.policy.observes_rows and returns_norms(layer, call, block)


def sum_block(layer: SlotLayer, call: Call, block: Block) -> Tensor:
    """Attend a block, and add its columns to the block's state, if the policy has any.

    Returns:
        (batch, heads, q_len, value_dim).
    """
    out, lse = attend_with_norms(layer, call, block)
    if call.context.norms is not None:
        call.context.norms.note(lse)
    batch, kv_heads, slots = call.key.shape[:3]
    sums = {name: block.state[name] for name in layer.policy.columns}
    waiting, by_head = deferred(layer), None
    if not sums and waiting is None:
        return out
    if waiting is not None:
        by_head = lse.new_zeros(batch, kv_heads, call.query.shape[1] // kv_heads, slots)
    for row, own in enumerate(_columns_of_rows(layer, call, block)):
        add_causal_columns(
            {name: total[row, :, own] for name, total in sums.items()},
            None if by_head is None else by_head[row, ..., own],
            call.query[row, :, own].unflatten(0, (kv_heads, -1)),
            call.key[row, :, own],
            lse[row, :, own].unflatten(0, (kv_heads, -1)),
            scale=call.scale,
        )
    if waiting is not None and by_head is not None:
        waiting.add(by_head, block.view.block)
    return out


def attend_with_norms(layer: SlotLayer, call: Call, block: Block) -> tuple[Tensor, Tensor]:
    """Attend a block by the fused kernel.

    Returns:
        (batch, heads, q_len, value_dim), and the log-sum-exp of the rows, (batch, heads, q_len)
        float32; 0 where there is padding.
    """
    batch, heads, q_len, _ = call.query.shape
    new = torch.zeros if layer.padded else torch.empty
    out = new(batch, q_len, heads, call.value.shape[-1], dtype=call.query.dtype).transpose(1, 2)
    lse = new(batch, heads, q_len, dtype=torch.float32)
    for row, own in enumerate(_columns_of_rows(layer, call, block)):
        if own.start == own.stop:
            continue
        # a KV head is an entry of the batch whose one head all queries of the group read: no copies
        query = call.query[row, :, own].unflatten(0, (call.key.shape[1], -1))
        key, value = (
            each[row, :, None, own].expand(-1, query.shape[1], -1, -1)
            for each in (call.key, call.value)
        )
        found, norms = fused_attention(query, key, value, call.scale, causal=True)
        out[row, :, own] = found.flatten(0, 1)
        lse[row, :, own] = norms.flatten(0, 1)
    return out, lse


def _columns_of_rows(layer: SlotLayer, call: Call, block: Block) -> list[slice]:
    """The columns of each batch entry that hold its tokens."""
    if not layer.padded:
        return [slice(0, call.q_len)] * len(call.query)
    return _token_columns(block.new.expand(len(call.query), -1))


def _token_columns(new: Tensor) -> list[slice]:
    """As many columns of each row as it has tokens, from its first token on."""
    valid = new >= 0
    first, count = valid.int().argmax(1).tolist(), valid.sum(1).tolist()
    return [slice(start, start + held) for start, held in zip(first, count, strict=True)]
