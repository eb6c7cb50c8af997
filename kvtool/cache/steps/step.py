"""Step that every layer runs: attend, observe, choose what to evict, free slots.

A prompt comes as one block or many, a decoded token as a block of one. Who attends is an object:
kvtool's own kernels, or the weights that a model's own eager attention has shown to a hook.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import refusal
from kvtool.cache.slots.ragged import RaggedBuffers
from kvtool.cache.steps.attend import attend_token, note_kernel
from kvtool.cache.steps.attend_block import OwnBlock
from kvtool.cache.steps.block import (
    Block,
    block_needs_all_rows,
    block_needs_last_rows,
    enter_block,
    leave_block,
)
from kvtool.cache.steps.bucket_calls import beside_slots, bucket_calls
from kvtool.cache.steps.call import AttendedToken, Call
from kvtool.cache.steps.evict import evict_after_token
from kvtool.cache.steps.grouped import LayerGroup
from kvtool.cache.steps.masked import check_mask, mask_by_slot, masked_attention
from kvtool.cache.steps.view import values_by_kv_head
from kvtool.errors import KvtoolError
from kvtool.maths.selection import take
from kvtool.policies.evidence import AttentionRows


class BlockAttention(Protocol):
    """Who attends a block: `OwnBlock`, or `kvtool.cache.hooks.eager.SeenBlock`."""

    def placed(self, layer: SlotLayer, block: Block) -> BlockAttention: ...

    def attend(self, layer: SlotLayer, block: Block, observed: bool) -> Tensor: ...

    def last_rows(self, layer: SlotLayer, block: Block) -> AttentionRows: ...

    def end(self, layer: SlotLayer, block: Block) -> Block | None: ...


class AttendedBlock(NamedTuple):
    """The output of a block, (batch, heads, q_len, value_dim), and the slots that stay.

    These are indices into [kept, block], (batch, kv_heads, slots); None: all stay.
    """

    out: Tensor
    chosen: Tensor | None


def run_step(layer: SlotLayer, call: Call, decoding: bool) -> Tensor:
    """Run a layer's step: (batch, heads, q_len, value_dim) (KvtoolError: parts refuse latents)."""
    if layer.parts and call.key is not call.raw_key:
        _check_latent(layer)
    if call.mask is not None:
        return _run_masked(layer, call, call.mask, decoding)
    if call.context.unstored is not None:
        return call.context.unstored.attend(layer, call)
    if not decoding:
        if layer.parts.kernel is None:
            note_kernel(layer, call)
        if layer.reads_apart and isinstance(layer.ragged, RaggedBuffers):
            return _run_ragged(layer, layer.ragged, call)
        block = call.context.block
        if block is None or call.q_len <= block:
            return _run_own(layer, call).out
        _check_split(call)
        return _run_blocks(layer, call, block)
    group = call.context.group
    if layer.parts and (group is None or group.joined):
        return _decode_with_parts(layer, call)
    layer.enter_token(call.positions)
    token = attend_token(layer, call, False)
    end_token(layer, token, call.value, group)
    return token.out


def end_token(
    layer: SlotLayer, token: AttendedToken, value: Tensor, group: LayerGroup | None
) -> None:
    """Count a decoded token's attention and choose what it evicts, alone or with other layers.

    Args:
        value: (batch, heads of the attention, slots, value_dim).
    """
    if group is not None:
        if value.shape[1] != layer.slots.kv_heads:
            value = values_by_kv_head(layer, value)
        group.add(layer, value, token.rows, token.counted)
    else:
        if not token.chosen:
            evict_after_token(layer, value, token.rows, counted=token.counted)
        layer.slots.end_token()


def run_block(
    layer: SlotLayer,
    attention: BlockAttention,
    positions: Tensor | None,
    raw: tuple[Tensor, Tensor],
    value: Tensor,
    q_len: int,
) -> AttendedBlock:
    """Attend one block and cut to the budget.

    Args:
        positions: (batch, q_len) of the new tokens, -1 = padding; None: nothing is padded.
        raw: keys and values as they are stored, (batch, kv_heads, slots, dim).
        value: values as they are attended, (batch, heads of the attention, slots, value_dim).
    """
    block = enter_block(layer, q_len, positions, raw[0], value)
    attention = attention.placed(layer, block)
    out = attention.attend(layer, block, block_needs_all_rows(layer, block))
    ended = attention.end(layer, block)
    if ended is None:
        return AttendedBlock(out, None)
    rows = attention.last_rows(layer, ended) if block_needs_last_rows(layer, ended) else None
    chosen = leave_block(layer, ended, *raw, rows)
    for part in layer.parts.at["end_block"]:
        part.end_block()
    return AttendedBlock(out, chosen)


def _run_own(layer: SlotLayer, call: Call) -> AttendedBlock:
    raw = call.raw_key, call.raw_value
    return run_block(layer, OwnBlock(call), call.positions, raw, call.value, call.q_len)


def _run_masked(layer: SlotLayer, call: Call, mask: Tensor, decoding: bool) -> Tensor:
    """Attend under the caller's own mask, a block in one piece."""
    check_mask(layer, call, mask, decoding)
    key, value = call.key, call.value
    if not decoding:
        block = enter_block(layer, call.q_len, None, call.raw_key, value)
        out = masked_attention(call, key, value, mask)
        leave_block(layer, block, call.raw_key, call.raw_value, None)
        return out
    layer.enter_token(None)
    layer.write_unwritten()
    if layer.attends_codes:
        key, value = layer.slots.dequantised()
    out = masked_attention(call, key, value, mask_by_slot(layer, mask))
    end_token(layer, AttendedToken(out), value, call.context.group)
    return out


def _check_latent(layer: SlotLayer) -> None:
    """Refuse parts that work on keys, in a layer whose keys are not stored as they are attended."""
    name = refusal(layer.parts.values(), "latents", layer.policy)
    if name is not None:
        raise KvtoolError(
            f"{name} needs keys that are stored as they are attended, and this model stores latents"
        )


def _check_split(call: Call) -> None:
    """Refuse to split a block inside a layer, where a caller needs it whole."""
    why = None
    if call.context.shares_kv:
        why = "a layer whose keys other layers read"
    elif call.spans is not None:
        why = "a layer that sees images from both sides"
    if why is not None:
        raise KvtoolError(
            f"a prompt of {call.q_len} tokens cannot be split inside {why}",
            hint="build the cache with prefill full, or feed the prompt in blocks of "
            f"{call.context.block} tokens",
        )


def _decode_with_parts(layer: SlotLayer, call: Call) -> Tensor:
    """Decode a token where something beside the slots has a say."""
    corrections = []
    for part in layer.parts.at["correct"]:
        correct = part.correct(layer, call, None)
        if correct is not None:
            corrections.append(correct)
    layer.enter_token(call.positions)
    for part in layer.parts.at["note_token"]:
        part.note_token(layer, call)
    if isinstance(layer.ragged, RaggedBuffers):
        token = _decode_ragged(layer, layer.ragged, call, bool(corrections))
    else:
        if layer.parts.attends is not None:
            found = layer.parts.attends.attend_token(layer, call)
            if found is not None:
                layer.slots.end_token()
                return found
        token = attend_token(layer, call, bool(corrections))
    out = token.out
    for correct in corrections:
        if token.lse is not None:
            out = correct(call.query, out, token.lse, 0)
    if layer.ragged is None:
        end_token(layer, token, call.value, call.context.group)
    return out


def _decode_ragged(
    layer: SlotLayer, ragged: RaggedBuffers, call: Call, needs_lse: bool
) -> AttendedToken:
    """Decode where KV heads hold different counts: by bucket, a lane as an entry of one head."""
    outs, sums, read = [], [], 0.0
    for bucket, step in bucket_calls(ragged, call, SlotLayer.write_token):
        bucket.enter_token(step.positions)
        for part in bucket.parts.at["note_token"]:
            part.note_token(bucket, step)
        token = attend_token(bucket, step, needs_lse)
        end_token(bucket, token, step.value, None)
        read += bucket.pairs_read * bucket.batch_size
        outs.append(token.out)
        if token.lse is not None:
            sums.append(token.lse)
    layer.read(read / len(ragged.order))
    out = ragged.put_back(torch.cat(outs)).flatten(1, 2)
    return AttendedToken(out, ragged.put_back(torch.cat(sums)).flatten(2, 3) if sums else None)


def _run_ragged(layer: SlotLayer, ragged: RaggedBuffers, call: Call) -> Tensor:
    """Attend and store a block where KV heads hold different counts, by bucket, and cut nothing."""
    valid = None if call.positions is None else (call.positions >= 0).sum(1)
    if valid is not None:
        layer.count_apart(len(valid), valid.device)
    elif layer.lengths is not None:
        valid = torch.full_like(layer.lengths, call.q_len)
    layer.enter_block(call.q_len, valid)
    calls = bucket_calls(ragged, call, beside_slots)
    outs = [_run_own(bucket, step).out for bucket, step in calls]
    return ragged.put_back(torch.cat(outs)).flatten(1, 2)


def _run_blocks(layer: SlotLayer, call: Call, size: int) -> Tensor:
    """Attend a prompt in blocks, counted from each entry's first token, cutting after each."""
    order = None
    if call.positions is not None:
        # padding goes behind the tokens
        order = (call.positions < 0).long().argsort(dim=-1, stable=True)
        layer.slots.read_out_of_order()
    kept, placement = call.key.shape[2] - call.q_len, call.context.placement
    latent = call.key is not call.raw_key
    sources = (call.key, call.value, call.raw_key, call.raw_value)
    new = [_reorder(t[:, :, kept:], order) for t in sources]
    query = _reorder(call.query, order)
    positions = call.positions
    if positions is not None and order is not None:
        positions = positions.gather(1, order)
    hidden = call.context.hidden
    if hidden is not None and order is not None:
        hidden = hidden.gather(1, order[..., None].expand_as(hidden))
    attended = call.key[:, :, :kept], call.value[:, :, :kept]
    outs = []
    for rows in (slice(i, i + size) for i in range(0, call.q_len, size)):
        last = call.context.last and rows.stop >= call.q_len
        layer.compact()
        raw_key, raw_value = layer.slots.joined(new[2][:, :, rows], new[3][:, :, rows])
        key, value = raw_key, raw_value
        if latent:
            key = torch.cat([attended[0], new[0][:, :, rows]], 2)
            value = torch.cat([attended[1], new[1][:, :, rows]], 2)
        there = None if placement is None else placement.after(rows.start)
        own = None if hidden is None else hidden[:, rows]
        step = replace(
            call,
            query=query[:, :, rows],
            key=key,
            value=value,
            raw_key=raw_key,
            raw_value=raw_value,
            positions=None if positions is None else positions[:, rows],
            context=replace(call.context, last=last, placement=there, norms=None, hidden=own),
        )
        out, chosen = _run_own(layer, step)
        outs.append(out)
        if latent:
            attended = (key, value) if chosen is None else (take(key, chosen), take(value, chosen))
    joined = torch.cat(outs, 2)
    if order is None:
        return joined
    return torch.empty_like(joined).scatter_(2, order[:, None, :, None].expand_as(joined), joined)


def _reorder(tensor: Tensor, order: Tensor | None) -> Tensor:
    return tensor if order is None else take(tensor, order[:, None])
