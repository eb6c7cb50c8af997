"""Attention over the slots by the kernel that fits: fused, flash, or weights in full.

Queries go in chunks, so that nothing of size prompt x prompt is ever held.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.cache.eviction import Block, WatchedBlock, last_queries, make_rows, weigh_votes
from kvtool.cache.handover import Fed
from kvtool.cache.slots import SlotLayer, take
from kvtool.maths.attention import (
    attention_weights,
    attention_weights_lse,
    group_queries,
    visible_keys,
    weighted_values,
)
from kvtool.policies.attention_rows import AttentionRows

_EXPLICIT_ROWS = 128  # queries whose weights are held at a time
_MASKED_ROWS = 1024  # queries whose boolean mask is held at a time


@dataclass(frozen=True)
class Call:
    """One call of the attention function.

    Attributes:
        query: (batch, heads, q_len, head_dim), after RoPE.
        key, value: (batch, heads of the attention, kept + q_len, dim): what the layer's `update`
            returned, which models with latent attention have expanded to all their heads since.
        raw_key, raw_value: what `update` returned, as it is stored.
        positions: (batch, q_len) int64 true position of each new token, -1 = padding; None where no
            row is padded.
        scale, softcap, sinks: as for `attention_weights`; the sinks of a whole layer as (heads,).
        kernel: what runs where nobody asks for weights: `sdpa`, `eager` (the weights after all) or
            `flash_attention_2`, for blocks without padding; anything else means `sdpa`.
        block: queries per block of a prompt; None: one block.
        last: whether the prompt ends with this block, for policies that cut it once.
        fed: where the model has placed the new tokens, where a layer places them anew.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    raw_key: Tensor
    raw_value: Tensor
    positions: Tensor | None
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    kernel: str = "sdpa"
    block: int | None = None
    last: bool = True
    fed: Fed | None = None

    @property
    def q_len(self) -> int:
        """New tokens."""
        return self.query.shape[2]

    @property
    def needs_weights(self) -> bool:
        """Whether no fused kernel can run this call."""
        return self.kernel == "eager" or self.softcap is not None or self.sinks is not None


def needs_mask(layer: SlotLayer, call: Call, block: Block) -> bool:
    """Whether `fused_block` has to make masks, with which sdpa may write all weights on a GPU."""
    if call.kernel == "flash_attention_2" and not layer.ragged:
        return False
    return layer.ragged or layer.window is not None or block.kept > 0


def fused_block(layer: SlotLayer, call: Call, block: Block) -> Tensor:
    q_len, heads = call.q_len, call.query.shape[1]
    grouped = heads != call.key.shape[1]
    if call.kernel == "flash_attention_2" and not layer.ragged:
        return _flash_block(layer, call)
    if not needs_mask(layer, call, block):
        return functional.scaled_dot_product_attention(
            call.query, call.key, call.value, is_causal=True, scale=call.scale, enable_gqa=grouped
        )
    parts = []
    for start, stop in _chunks(layer, q_len, _MASKED_ROWS):
        low, high = _reach(layer, block, start, stop)
        mask = _visible(layer, block, start, stop, low, high)
        if mask.shape[1] > 1:
            mask = mask.expand(-1, -1, heads // mask.shape[1], -1, -1)
        parts.append(
            functional.scaled_dot_product_attention(
                call.query[:, :, start:stop],
                call.key[:, :, low:high],
                call.value[:, :, low:high],
                attn_mask=mask.flatten(1, 2),
                scale=call.scale,
                enable_gqa=grouped,
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _flash_block(layer: SlotLayer, call: Call) -> Tensor:
    """A block without padding in the flash-attn package, whose causal mask ends at the last key."""
    from flash_attn import flash_attn_func

    reach = (-1, -1) if layer.window is None else (layer.window - 1, 0)
    out = flash_attn_func(
        call.query.transpose(1, 2),
        call.key.transpose(1, 2),
        call.value.transpose(1, 2),
        softmax_scale=call.scale,
        causal=True,
        window_size=reach,
    )
    return out.transpose(1, 2)


def explicit_block(layer: SlotLayer, call: Call, block: Block, observed: bool) -> Tensor:
    parts = []
    valid = block.new >= 0 if layer.ragged else None
    causal = not layer.ragged and layer.window is None  # all but the chunk's own keys are visible
    watch = WatchedBlock(layer, block) if observed else None
    calibration = layer.calibration if layer.calibration and layer.calibration.active else None
    for start, stop in _chunks(layer, call.q_len, _EXPLICIT_ROWS):
        low, high = _reach(layer, block, start, stop)
        visible = _visible(layer, block, start, stop, low, high)
        query, key = call.query[:, :, start:stop], call.key[:, :, low:high]
        unsure = visible[..., block.kept + start :] if causal else visible
        if calibration is None:
            weights = call_weights(call, query, key, unsure)
            parts.append(weighted_values(weights, call.value[:, :, low:high]))
        else:
            weights, lse = call_weights_lse(call, query, key, unsure)
            out = weighted_values(weights, call.value[:, :, low:high])
            parts.append(calibration.correct_block(query, out, lse, start))
        if watch is not None:
            seen = None if valid is None else valid[:, start:stop]
            watch.see(make_rows(layer, weights, visible[:, :, 0], seen))
    if watch is not None:
        watch.end()
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def last_of_prompt(layer: SlotLayer, call: Call, block: Block) -> tuple[Tensor, Tensor]:
    """The last queries that a policy sees, those of earlier blocks of a prompt cut once included.

    Returns:
        (batch, heads, rows, head_dim), and their positions, (batch or 1, rows), -1 = padding.
    """
    query, new = call.query, block.new
    if layer.tail is not None:
        before, positions = layer.tail
        query = torch.cat([before, query], 2)
        rows = max(new.shape[0], positions.shape[0])
        new = torch.cat([positions.expand(rows, -1), new.expand(rows, -1)], 1)
    last = last_queries(layer, new)
    return take(query, last[:, None].expand(query.shape[0], -1, -1)), new.gather(1, last)


def last_rows(layer: SlotLayer, call: Call, block: Block) -> AttentionRows:
    query, new = last_of_prompt(layer, call, block)
    weights = weigh_votes(layer, block, new.shape[1])
    if weights is None:
        return _rows_of(layer, call, block, query, new)
    total: Tensor | None = None
    for start in range(0, new.shape[1], _EXPLICIT_ROWS):
        part = slice(start, start + _EXPLICIT_ROWS)
        rows = _rows_of(layer, call, block, query[:, :, part], new[:, part])
        votes = rows.summed(weights[:, part]).weights
        total = votes if total is None else total.add_(votes)
    return AttentionRows(total)


def _rows_of(
    layer: SlotLayer, call: Call, block: Block, query: Tensor, new: Tensor
) -> AttentionRows:
    visible = visible_keys(new, block.view.positions)
    weights = call_weights(call, query, call.key, visible)
    return make_rows(layer, weights, visible[:, :, 0], new >= 0 if layer.ragged else None)


def _chunks(layer: SlotLayer, q_len: int, rows: int) -> list[tuple[int, int]]:
    if layer.window is not None:
        rows = min(rows, max(_EXPLICIT_ROWS, layer.window))
    return [(start, min(start + rows, q_len)) for start in range(0, q_len, rows)]


def _reach(layer: SlotLayer, block: Block, start: int, stop: int) -> tuple[int, int]:
    """First and last key that a chunk of queries can see."""
    low = 0
    if layer.window is not None and not layer.ragged:
        low = max(0, block.kept + start - layer.window + 1)
    return low, block.kept + stop


def _visible(layer: SlotLayer, block: Block, start: int, stop: int, low: int, high: int) -> Tensor:
    """Mask of a chunk: bool (batch or 1, kv_heads or 1, 1, rows, keys)."""
    if layer.ragged:
        positions = block.view.positions[:, :, low:high]
        if block.kept == 0:
            positions = positions[:, :1]  # no head has lost anything yet
        return visible_keys(block.new[:, start:stop], positions, layer.window)
    device = block.new.device
    query = torch.arange(block.kept + start, block.kept + stop, device=device)[:, None]
    key = torch.arange(low, high, device=device)
    visible = key <= query
    if layer.window is not None:
        visible &= key > query - layer.window
    return visible[None, None, None]


def call_weights(call: Call, query: Tensor, key: Tensor, visible: Tensor | None) -> Tensor:
    """Weights by the heads of the attention: (batch, heads, group, rows, keys) float32."""
    heads = key.shape[1]
    return attention_weights(
        group_queries(query, heads),
        key,
        scale=call.scale,
        visible=visible,
        softcap=call.softcap,
        sinks=_grouped_sinks(call, heads),
    )


def call_weights_lse(
    call: Call, query: Tensor, key: Tensor, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same weights, and their log-sum-exp, (batch, heads, group, rows)."""
    heads = key.shape[1]
    return attention_weights_lse(
        group_queries(query, heads),
        key,
        scale=call.scale,
        visible=visible,
        softcap=call.softcap,
        sinks=_grouped_sinks(call, heads),
    )


def _grouped_sinks(call: Call, heads: int) -> Tensor | None:
    whole = call.sinks is not None and call.sinks.dim() == 1
    return call.sinks.view(heads, -1) if whole else call.sinks


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Attention of one query per row; the queries of a group are packed, keys not repeated."""
    grouped = group_queries(query, key.shape[1])[:, :, :, 0]
    if mask is not None:
        mask = mask.expand(-1, key.shape[1], grouped.shape[2], -1)
    out = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    return out.flatten(1, 2)[:, :, None]
