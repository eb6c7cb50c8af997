"""Turn keys and queries from where the model placed them to their places among the kept tokens.

With `positions=cache` a token stands at its rank among the tokens that its KV head keeps, in order
of true position, as StreamingLLM has it (https://arxiv.org/abs/2309.17453, section 3.2). A stored
key is never changed; beside it stands its shift, the rank minus the position at which the model
has turned it. Each step turns copies, so that nothing adds up.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvtool.cache.features.rope_shift import RopeShift
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.steps.block import Block
from kvtool.cache.steps.call import Call
from kvtool.policies.numbers import SHIFT, Count


@torch.no_grad()
def shift_block(layer: SlotLayer, call: Call, block: Block) -> Call:
    """Bring the kept slots and a block behind them to their ranks."""
    part = RopeShift.of(layer)
    if part is None or part.rotation is None:
        return call
    kept, rotation = block.kept, part.rotation
    held: Count = kept
    if kept and layer.padded:
        held = (block.view.positions[:, :, :kept] >= 0).sum(-1, keepdim=True)
    shifts, new_shift = block.state[SHIFT], _new_shift(call, held)
    old, new, query = call.key[:, :, :kept], call.key[:, :, kept:], call.query
    if new_shift is not None:
        shifts[:, :, kept:] = new_shift
        new = rotation.shift(new, shifts[:, :, kept:])
        query = rotation.shift(query, _by_query(new_shift, query))
    if kept:
        old = rotation.shift(old, shifts[:, :, :kept])
        new = torch.cat([old, new], 2)
    return replace(call, key=new, query=query)


def shift_decoded(layer: SlotLayer, call: Call) -> Call:
    """Bring the slots, with the decoded token among them, to their ranks."""
    call = shift_query(layer, call)
    return replace(call, key=shift_keys(layer, call.key, slice(0, layer.slots.used)))


@torch.no_grad()
def shift_keys(layer: SlotLayer, keys: Tensor, slots: slice) -> Tensor:
    """Bring the keys of some slots to their ranks, once the decoded token has its own."""
    part = RopeShift.of(layer)
    if part is None or part.rotation is None:
        return keys
    shifts = layer.slots.state[SHIFT][:, :, slots]
    return part.rotation.shift(keys, shifts)


@torch.no_grad()
def shift_query(layer: SlotLayer, call: Call) -> Call:
    """Bring the query of a decoded token to the rank of its slot, and note its shift there."""
    part, slots = RopeShift.of(layer), layer.slots
    if part is None or part.rotation is None:
        return call
    held: Count = slots.used - 1
    if layer.padded:
        held = (slots.positions[:, :, : slots.used] >= 0).sum(-1, keepdim=True) - 1
    shifts, new_shift = slots.state[SHIFT][:, :, : slots.used], _new_shift(call, held)
    query = call.query
    if new_shift is not None:
        if slots.written is None:
            shifts[:, :, -1:] = new_shift
        else:
            shifts.scatter_(2, slots.written, new_shift.expand_as(slots.written))
        query = part.rotation.shift(query, _by_query(new_shift, query))
    return replace(call, query=query)


def _new_shift(call: Call, held: Count) -> Tensor | None:
    """How far the new tokens still have to be shifted; None: not at all.

    Args:
        held: tokens kept before them.

    Returns:
        (batch or 1, kv_heads or 1, 1) float32.
    """
    placement = call.context.placement
    if placement is None:
        raise RuntimeError("positions=cache, and nobody has placed the new tokens")
    start = placement.start
    if isinstance(start, Tensor):
        start = start.view(-1, 1, 1)
    shift = held - start
    if isinstance(shift, Tensor):
        return shift.float()
    return (
        None
        if shift == 0
        else torch.full((1, 1, 1), float(shift), dtype=torch.float32, device=call.query.device)
    )


def _by_query(shift: Tensor, query: Tensor) -> Tensor:
    """Shifts of the queries, the same for a KV head's group: (.., heads or 1, q_len)."""
    batch, heads, q_len, _ = query.shape
    if shift.shape[1] > 1:
        shift = shift.repeat_interleave(heads // shift.shape[1], 1)
    return shift.expand(batch, -1, q_len)
