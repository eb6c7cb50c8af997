"""The one step that every layer runs: attend, observe, choose victims, free slots.

A prompt comes as one block or many, a decoded token as a block of one. Queries go in chunks, so
that nothing of size prompt x prompt is ever held.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.cache.slots import SlotLayer, take
from kvtool.maths.attention import attention_weights, group_queries, visible_keys, weighted_values
from kvtool.maths.selection import keep_top, lowest
from kvtool.policies.parts import Count, Evidence, Rows, SlotView, State, at_least_zero

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
        scale, softcap, sinks: as for `attention_weights`, the sinks as (heads,).
        kernel: what runs where nobody asks for weights: `sdpa`, `eager` (the weights after all) or
            `flash_attention_2`, for blocks without padding; anything else means `sdpa`.
        block: queries per block of a prompt; None: one block.
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

    @property
    def q_len(self) -> int:
        """New tokens."""
        return self.query.shape[2]

    @property
    def needs_weights(self) -> bool:
        """Whether no fused kernel can run this call."""
        return self.kernel == "eager" or self.softcap is not None or self.sinks is not None


@dataclass(frozen=True)
class Block:
    """A block of new tokens behind the kept slots of a layer.

    Attributes:
        new: (batch or 1, q_len) int64 positions of the new tokens, -1 = padding.
        view: the kept slots and the block.
        state: the policy's numbers for them.
        kept: how many slots come before the block.
    """

    new: Tensor
    view: SlotView
    state: State
    kept: int


def attend(layer: SlotLayer, call: Call, decoding: bool) -> Tensor:
    """Run a layer's step.

    Returns:
        (batch, heads, q_len, value_dim).
    """
    if decoding:
        return _decode(layer, call)
    if call.block is None or call.q_len <= call.block:
        return _attend_block(layer, call)[0]
    return _attend_blocks(layer, call)


# --------------------------------------------------------------------------------------------------
# -------- decode


def _decode(layer: SlotLayer, call: Call) -> Tensor:
    enter_decode(layer, call.positions)
    visible = (layer.positions[:, :, : layer.used] >= 0)[:, :, None, None] if layer.ragged else None
    rows = None
    if decode_needs_rows(layer) or call.needs_weights:
        weights = _weights(call, call.query, call.key, visible)
        out = weighted_values(weights, call.value)
        rows = decode_rows(layer, weights, call.positions)
    else:
        mask = None if visible is None else visible[:, :, 0]
        out = _packed_attention(call.query, call.key, call.value, mask, call.scale)
    leave_decode(layer, call.value, rows)
    return out


def enter_decode(layer: SlotLayer, positions: Tensor | None) -> None:
    """Place the token that the layer has just taken in, and count it.

    Args:
        positions: (batch, 1), -1 where a row has padding instead; None: no padding.
    """
    if positions is not None and not layer.ragged:
        layer.lengths = torch.full_like(positions[:, 0], layer.seen - 1)
    if not layer.ragged:
        layer.place(layer.seen - 1)
        return
    new = layer.lengths if positions is None else positions[:, 0].to(layer.lengths.device)
    layer.place(new)
    layer.lengths = layer.lengths + (new >= 0)


def decode_needs_rows(layer: SlotLayer) -> bool:
    """Whether the policy wants the weights of the token being decoded."""
    score = layer.policy.ranking
    if score.when != "always" or score.evidence is Evidence.NOTHING:
        return False
    return score.evidence is Evidence.ALL_ROWS or layer.used > layer.least


def decode_rows(layer: SlotLayer, weights: Tensor, positions: Tensor | None) -> Rows:
    """The weights of a decoded token as evidence."""
    visible = (layer.positions[:, :, None, : layer.used] >= 0) if layer.ragged else None
    valid = None if positions is None else positions >= 0
    return make_rows(layer, weights, visible, valid)


def leave_decode(layer: SlotLayer, value: Tensor, rows: Rows | None) -> None:
    """Add the new row to the statistics and choose the slot that the next token overwrites."""
    if layer.group is not None:
        layer.group.arrive(layer, _by_kv_head(layer, value), rows)
        return
    score = layer.policy.ranking
    observed = score.evidence is Evidence.ALL_ROWS
    if score.when != "always" or not (observed or layer.used > layer.least):
        return
    view, state = _used_view(layer, value), _used_state(layer)
    if observed:
        score.observe(state, view, rows)
    if layer.used <= layer.least:
        return
    if layer.ragged and layer.used <= layer.most:
        more = layer.most + 1 - layer.used
        layer.fill_to(layer.most + 1)
        value = functional.pad(value, (0, 0, 0, more))
        if rows is not None:
            rows = replace(rows, weights=functional.pad(rows.weights, (0, more)))
        view, state = _used_view(layer, value), _used_state(layer)
    importance, protected = _judge(layer, view, state, rows, victims=1)
    if layer.ragged:
        # a row below its budget takes an empty slot, a row above it gives up its worst one
        empty = view.positions < 0
        over = view.held > layer.budget
        importance = importance.masked_fill(empty & ~over, float("-inf"))
        unused = empty & over
        protected = unused if protected is None else (protected & over) | unused
    distinct = score.distinct and layer.policy.rescore is None
    layer.pending = lowest(importance, view.positions, protected, distinct)


def _used_state(layer: SlotLayer) -> State:
    return {name: number[:, :, : layer.used] for name, number in layer.state.items()}


def _used_view(layer: SlotLayer, value: Tensor) -> SlotView:
    positions = layer.positions[:, :, : layer.used]
    return SlotView(
        values=(_by_kv_head(layer, value),),
        positions=positions,
        tokens_seen=_tokens_seen(layer),
        budget=layer.budget,
        held=_held(layer, positions),
        layer=layer.index,
    )


# --------------------------------------------------------------------------------------------------
# -------- prompt


def _attend_blocks(layer: SlotLayer, call: Call) -> Tensor:
    """Attend a prompt in blocks, counted from each row's own first token, cutting after each."""
    order = None
    if call.positions is not None:
        # padding goes behind the tokens
        order = (call.positions < 0).long().argsort(dim=-1, stable=True)
    kept = call.key.shape[2] - call.q_len
    expanded = call.key is not call.raw_key
    sources = (call.key, call.value, call.raw_key, call.raw_value)
    new = [_reorder(t[:, :, kept:], order) for t in sources]
    query = _reorder(call.query, order)
    positions = None if order is None else call.positions.gather(1, order)
    attended = call.key[:, :, :kept], call.value[:, :, :kept]
    out = []
    layer.seen -= call.q_len
    for part in (slice(i, i + call.block) for i in range(0, call.q_len, call.block)):
        raw_key, raw_value = layer.joined(new[2][:, :, part], new[3][:, :, part])
        key, value = raw_key, raw_value
        if expanded:
            key = torch.cat([attended[0], new[0][:, :, part]], 2)
            value = torch.cat([attended[1], new[1][:, :, part]], 2)
        step = replace(
            call,
            query=query[:, :, part],
            key=key,
            value=value,
            raw_key=raw_key,
            raw_value=raw_value,
            positions=None if positions is None else positions[:, part],
        )
        layer.seen += step.q_len
        block_out, chosen = _attend_block(layer, step)
        out.append(block_out)
        if expanded:
            attended = (key, value) if chosen is None else (take(key, chosen), take(value, chosen))
    joined = torch.cat(out, 2)
    if order is None:
        return joined
    return torch.empty_like(joined).scatter_(2, order[:, None, :, None].expand_as(joined), joined)


def _reorder(tensor: Tensor, order: Tensor | None) -> Tensor:
    return tensor if order is None else take(tensor, order[:, None])


def _attend_block(layer: SlotLayer, call: Call) -> tuple[Tensor, Tensor | None]:
    """Attend one block and cut to the budget.

    Returns:
        (batch, heads, q_len, value_dim), and the slots of [kept, block] that stay, None if all do.
    """
    block = enter_block(layer, call.q_len, call.positions, call.raw_key, call.value)
    observed = block_needs_all_rows(layer)
    if observed or call.needs_weights:
        out = _explicit_block(layer, call, block, observed)
    else:
        out = _fused_block(layer, call, block)
    rows = _last_rows(layer, call, block) if block_needs_last_rows(layer, block) else None
    return out, leave_block(layer, block, call.raw_key, call.raw_value, rows)


def enter_block(
    layer: SlotLayer, q_len: int, positions: Tensor | None, raw_key: Tensor, value: Tensor
) -> Block:
    """Count the block's tokens and lay out the kept slots and the block as a policy sees them."""
    batch, heads, total = layer.positions.shape[0], layer.positions.shape[1], raw_key.shape[2]
    device = raw_key.device
    if positions is not None and not layer.ragged:
        layer.lengths = torch.full((batch,), layer.seen - q_len, device=device)
    count: Count = q_len
    if layer.ragged:
        new = layer.lengths[:, None] + torch.arange(q_len, device=device)
        new = new if positions is None else positions.to(device)
        valid = (new >= 0).sum(1)
        layer.lengths = layer.lengths + valid
        count = valid[:, None, None]
    else:
        new = torch.arange(layer.seen - q_len, layer.seen, device=device)[None]
    kept = total - q_len
    stored = new.to(torch.int32)[:, None].expand(batch, heads, q_len)
    if kept:
        stored = torch.cat([layer.positions[:, :, :kept], stored], 2)
    state = {
        name: functional.pad(number[:, :, :kept], (0, q_len))
        for name, number in layer.state.items()
    }
    view = SlotView(
        values=(_by_kv_head(layer, value),),
        positions=stored,
        tokens_seen=_tokens_seen(layer),
        budget=layer.budget,
        held=_held(layer, stored),
        layer=layer.index,
        block=count,
    )
    return Block(new, view, state, kept)


def block_needs_all_rows(layer: SlotLayer) -> bool:
    """Whether the policy wants the weights of every query of a block."""
    return layer.policy.ranking.evidence is Evidence.ALL_ROWS


def block_needs_last_rows(layer: SlotLayer, block: Block) -> bool:
    """Whether the policy wants the last queries' weights: only if something has to go."""
    return layer.policy.ranking.evidence is Evidence.LAST_ROWS and _over_budget(layer, block)


def leave_block(
    layer: SlotLayer, block: Block, raw_key: Tensor, raw_value: Tensor, rows: Rows | None
) -> Tensor | None:
    """Store the block, and cut to the budget if it is over.

    Args:
        raw_key, raw_value: (batch, kv_heads, kept + q_len, dim), as stored.
        rows: the last rows, for a policy that wants them.

    Returns:
        (batch, kv_heads, slots) indices of what stays, in ascending position; None if everything
        stays.
    """
    view = block.view
    if not _over_budget(layer, block):
        new = slice(block.kept, None)
        layer.extend(raw_key[:, :, new], raw_value[:, :, new], view.positions, block.state)
        return None
    victims = at_least_zero(view.held - layer.budget)
    importance, protected = _judge(layer, view, block.state, rows, victims)
    slots = min(layer.most, view.positions.shape[2])
    chosen, positions = keep_top(importance, view.positions, layer.budget, protected, slots)
    state = {name: number.gather(2, chosen) for name, number in block.state.items()}
    layer.replace(take(raw_key, chosen), take(raw_value, chosen), positions, state)
    return chosen


def _over_budget(layer: SlotLayer, block: Block) -> bool:
    if layer.policy.ranking.when == "never":
        return False
    return block.view.positions.shape[2] > layer.least


# -------------------------------------------------------------------------------------------------
# attention of a block


def _fused_block(layer: SlotLayer, call: Call, block: Block) -> Tensor:
    q_len, heads = call.q_len, call.query.shape[1]
    grouped = heads != call.key.shape[1]
    if call.kernel == "flash_attention_2" and not layer.ragged:
        return _flash_block(layer, call)
    if block.kept == 0 and not layer.ragged and layer.window is None:
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


def _explicit_block(layer: SlotLayer, call: Call, block: Block, observed: bool) -> Tensor:
    parts = []
    valid = block.new >= 0 if layer.ragged else None
    for start, stop in _chunks(layer, call.q_len, _EXPLICIT_ROWS):
        low, high = _reach(layer, block, start, stop)
        visible = _visible(layer, block, start, stop, low, high)
        weights = _weights(call, call.query[:, :, start:stop], call.key[:, :, low:high], visible)
        parts.append(weighted_values(weights, call.value[:, :, low:high]))
        if observed:
            seen = None if valid is None else valid[:, start:stop]
            rows = make_rows(layer, weights, visible[:, :, 0], seen)
            layer.policy.ranking.observe(block.state, block.view, rows)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _last_rows(layer: SlotLayer, call: Call, block: Block) -> Rows:
    last = last_queries(layer, block, call.q_len)
    new = block.new.gather(1, last)
    query = take(call.query, last[:, None].expand(call.query.shape[0], -1, -1))
    visible = visible_keys(new, block.view.positions)
    weights = _weights(call, query, call.key, visible)
    return make_rows(layer, weights, visible[:, :, 0], new >= 0 if layer.ragged else None)


def last_queries(layer: SlotLayer, block: Block, q_len: int) -> Tensor:
    """Index of the last queries of each row that a policy sees: (batch or 1, rows)."""
    count = min(layer.policy.ranking.window, q_len)
    place = torch.arange(q_len, device=block.new.device)[None]
    if layer.ragged:
        place = torch.where(block.new >= 0, place, -1).argsort(-1)
    return place[:, -count:]


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


def _weights(call: Call, query: Tensor, key: Tensor, visible: Tensor | None) -> Tensor:
    """Weights by the heads of the attention: (batch, heads, group, rows, keys) float32."""
    heads = key.shape[1]
    sinks = None if call.sinks is None else call.sinks.view(heads, -1)
    return attention_weights(
        group_queries(query, heads),
        key,
        scale=call.scale,
        visible=visible,
        softcap=call.softcap,
        sinks=sinks,
    )


def _packed_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Attention of one query per row; the queries of a group are packed, keys not repeated."""
    grouped = group_queries(query, key.shape[1])[:, :, :, 0]
    if mask is not None:
        mask = mask.expand(-1, key.shape[1], grouped.shape[2], -1)
    out = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    return out.flatten(1, 2)[:, :, None]


# --------------------------------------------------------------------------------------------------
# ---- for policies


def make_rows(
    layer: SlotLayer, weights: Tensor, visible: Tensor | None, valid: Tensor | None
) -> Rows:
    """Weights by the heads that are cached; rows of padding count for nothing."""
    batch, _, _, q_len, keys = weights.shape
    weights = weights.reshape(batch, layer.positions.shape[1], -1, q_len, keys)
    if valid is not None:
        weights = weights * valid[:, None, None, :, None]
    return Rows(weights, visible, valid)


def _judge(
    layer: SlotLayer, view: SlotView, state: State, rows: Rows | None, victims: Count
) -> tuple[Tensor, Tensor | None]:
    score = layer.policy.ranking
    importance = score.importance(state, view, rows)
    if layer.policy.rescore is not None:
        importance = layer.policy.rescore.rescore(importance, view)
    return importance.expand_as(view.positions), score.protected(state, view, victims)


def _tokens_seen(layer: SlotLayer) -> Count:
    return layer.lengths[:, None, None] if layer.ragged else layer.seen


def _held(layer: SlotLayer, positions: Tensor) -> Count:
    """Stored slots of each row; heads of a row hold equally many."""
    if not layer.ragged:
        return positions.shape[2]
    return (positions[:, :1] >= 0).sum(-1, keepdim=True)


def _by_kv_head(layer: SlotLayer, value: Tensor) -> Tensor:
    """Values by the heads that are cached: latent attention caches one for all heads."""
    kv_heads = layer.positions.shape[1]
    if value.shape[1] == kv_heads or layer.policy.rescore is None:
        return value
    batch, heads, slots, dim = value.shape
    grouped = value.view(batch, kv_heads, heads // kv_heads, slots, dim)
    return grouped.transpose(2, 3).reshape(batch, kv_heads, slots, -1)
