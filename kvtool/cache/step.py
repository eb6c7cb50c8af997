"""The one step that every layer runs: attend, observe, choose victims, free slots.

A prompt comes as one block or many, a decoded token as a block of one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtool.cache.counting import can_count, can_run, count_block, count_slots
from kvtool.cache.eviction import (
    Block,
    block_needs_all_rows,
    block_needs_last_rows,
    count_decoded,
    decode_needs_rows,
    decode_rows,
    enter_block,
    enter_decode,
    leave_block,
    leave_decode,
    store_block,
)
from kvtool.cache.kernels import (
    Call,
    call_weights,
    call_weights_lse,
    explicit_block,
    fused_block,
    last_of_prompt,
    last_rows,
    needs_mask,
    packed_attention,
)
from kvtool.cache.slots import SlotLayer, take
from kvtool.cache.sparse_step import sparse_decode
from kvtool.cache.turning import turn_block, turn_decoded
from kvtool.errors import KvtoolError
from kvtool.kernels.kind import Family
from kvtool.maths.attention import group_queries, weighted_values
from kvtool.policies.attention_rows import AttentionRows


def attend(layer: SlotLayer, call: Call, decoding: bool) -> Tensor:
    """Run a layer's step.

    Returns:
        (batch, heads, q_len, value_dim).

    Raises:
        KvtoolError: evicted tokens should be merged or kept aside, or a reader chooses keys, and
            the model stores latents.
    """
    for part in (layer.reader, layer.policy.on_evict):
        if part is not None and call.key is not call.raw_key:
            raise KvtoolError(
                f"`{part.name}` needs keys that are stored as they are attended, "
                "and this model stores latents"
            )
    if layer.rotation is not None and call.key is not call.raw_key:
        raise KvtoolError("positions=cache needs keys that are stored as they are attended")
    if decoding:
        return _decode(layer, call)
    if call.block is None or call.q_len <= call.block:
        return _attend_block(layer, call)[0]
    return _attend_blocks(layer, call)


def _decode(layer: SlotLayer, call: Call) -> Tensor:
    calibration, ticket = layer.calibration, None
    if calibration is not None:
        calibration.set_scale(call.scale, call.softcap)
        ticket = calibration.begin_decode(call.query, call.raw_key.shape[1], call.positions)
    if layer.lanes is not None:
        out, lse = _decode_lanes(layer, call, ticket is not None)
        return out if ticket is None else calibration.end_decode(ticket, out, lse)
    if layer.reading is not None:
        enter_decode(layer, call.positions)
        return sparse_decode(layer, call)
    token = _attend_token(layer, call, ticket is not None)
    out = token.out
    if ticket is not None:
        out = calibration.end_decode(ticket, out, token.lse)
    leave_decode(layer, call.value, token.rows, token.counted)
    return out


@dataclass(frozen=True)
class _Token:
    """What came of attending the slots by a decoded token.

    Attributes:
        out: (batch, heads, 1, value_dim).
        lse: the log-sum-exp (batch, heads of the attention, group, 1), if it is needed.
        rows: the weights, if the policy wants them.
        counted: whether they are in the numbers beside the slots already.
    """

    out: Tensor
    lse: Tensor | None = None
    rows: AttentionRows | None = None
    counted: bool = False


def _attend_token(layer: SlotLayer, call: Call, needs_lse: bool) -> _Token:
    enter_decode(layer, call.positions)
    call = turn_decoded(layer, call)
    visible = (layer.positions[:, :, : layer.used] >= 0)[:, :, None, None] if layer.masked else None
    observed = decode_needs_rows(layer)
    if not (observed or call.needs_weights or needs_lse):
        mask = None if visible is None else visible[:, :, 0]
        return _Token(packed_attention(call.query, call.key, call.value, mask, call.scale))
    if not needs_lse and can_count(layer, call, Family.SLOTS):
        out, rows = count_slots(layer, call)
        return _Token(out, rows=rows, counted=True)
    if needs_lse:
        weights, lse = call_weights_lse(call, call.query, call.key, visible)
    else:
        weights, lse = call_weights(call, call.query, call.key, visible), None
    rows = decode_rows(layer, weights, call.positions) if observed else None
    return _Token(weighted_values(weights, call.value), lse, rows)


def _decode_lanes(layer: SlotLayer, call: Call, needs_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Decode where KV heads hold different counts: store by store, a lane as a row of one head.

    Returns:
        The output and, if it is needed, the log-sum-exp, as of a `_Token`.
    """
    lanes, heads = layer.lanes, layer.lanes.kv_heads
    count_decoded(layer, call.positions)
    query = lanes.pick(group_queries(call.query, heads))
    key, value = lanes.pick(call.raw_key)[:, None], lanes.pick(call.raw_value)[:, None]
    positions, sinks, fed = call.positions, call.sinks, call.fed
    if fed is not None:
        fed = fed.of(lambda rows: lanes.pick(rows[:, None].expand(-1, heads)))
    if positions is not None:
        positions = lanes.pick(positions[:, None].expand(-1, heads, -1))
    if sinks is not None:
        sinks = lanes.pick(sinks.view(1, heads, 1, -1).expand(len(call.query), -1, -1, -1))
    outs, sums, start, read = [], [], 0, 0.0
    for store in lanes.stores:
        own = slice(start, start + store.batch_size)
        start = own.stop
        all_keys, all_values = store.update(key[own], value[own], decoding=True)
        step = replace(
            call,
            query=query[own],
            key=all_keys,
            value=all_values,
            raw_key=all_keys,
            raw_value=all_values,
            positions=None if positions is None else positions[own],
            sinks=None if sinks is None else sinks[own],
            fed=None if fed is None else fed.of(lambda rows, own=own: rows[own]),
        )
        token = _attend_token(store, step, needs_lse)
        leave_decode(store, step.value, token.rows, token.counted)
        read += store.pairs_read * store.batch_size
        outs.append(token.out)
        sums.append(token.lse)
    layer.pairs_read = read / len(lanes.order)
    whole = lanes.put_back(torch.cat(outs)).flatten(1, 2)
    return whole, lanes.put_back(torch.cat(sums)).flatten(2, 3) if needs_lse else None


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
        layer.settle()  # the block before may have left heads of unequal counts, stored apart
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
            fed=None if call.fed is None else call.fed.behind(part.start),
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
    call = turn_block(layer, call, block)
    observed, calibration = block_needs_all_rows(layer), layer.calibration
    if calibration is not None:
        calibration.set_scale(call.scale, call.softcap)
        calibration.begin_block(call.query, call.value.shape[-1], block.new)
    corrected = calibration is not None and calibration.active
    if not (observed or call.needs_weights or corrected):
        masked = needs_mask(layer, call, block) and can_run(call, Family.ROWS, layer.window)
        out = count_block(layer, call, block, False) if masked else fused_block(layer, call, block)
    elif not corrected and can_count(layer, call, Family.ROWS):
        out = count_block(layer, call, block, observed)
    else:
        out = explicit_block(layer, call, block, observed)
    if layer.policy.two_stages:
        if not call.last:
            layer.tail = last_of_prompt(layer, call, block)
            store_block(layer, block, call.raw_key, call.raw_value)
            return out, None
        block = _with_tail(layer, block)
    rows = last_rows(layer, call, block) if block_needs_last_rows(layer, block) else None
    chosen = leave_block(layer, block, call.raw_key, call.raw_value, rows)
    layer.tail = None
    return out, chosen


def _with_tail(layer: SlotLayer, block: Block) -> Block:
    """The last block of a prompt, counting the last queries of the blocks before as its own."""
    if layer.tail is None:
        return block
    positions = layer.tail[1]
    count = (positions >= 0).sum(1)[:, None, None] if layer.ragged else positions.shape[1]
    return replace(block, view=replace(block.view, block=block.view.block + count))
