"""Turn keys and queries from where the model placed them to their places among the kept tokens.

With `positions=cache` a token stands at its rank among the tokens that its KV head keeps, in order
of true position, as StreamingLLM has it (https://arxiv.org/abs/2309.17453, section 3.2). A stored
key is never changed; beside it stands its turn, the rank minus the position at which the model has
turned it. Each step turns copies, so that nothing adds up.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvtool.cache.eviction import Block
from kvtool.cache.kernels import Call
from kvtool.cache.slots import SlotLayer
from kvtool.policies.numbers import SHIFT, Count


@torch.no_grad()
def turn_block(layer: SlotLayer, call: Call, block: Block) -> Call:
    """Bring the kept slots and a block behind them to their ranks."""
    if layer.rotation is None:
        return call
    kept = block.kept
    held: Count = kept
    if kept and layer.ragged:
        held = (block.view.positions[:, :, :kept] >= 0).sum(-1, keepdim=True)
    turns, late = block.state[SHIFT], _late(call, held)
    reach = _reach(layer, call, kept + call.q_len)
    old, new, query = call.key[:, :, :kept], call.key[:, :, kept:], call.query
    if late is not None:
        turns[:, :, kept:] = late
        new = layer.rotation.turn(new, turns[:, :, kept:], reach)
        query = layer.rotation.turn(query, _by_query(late, query), reach)
    if kept:
        old = layer.rotation.turn(old, turns[:, :, :kept], reach)
        new = torch.cat([old, new], 2)
    return replace(call, key=new, query=query)


@torch.no_grad()
def turn_decoded(layer: SlotLayer, call: Call) -> Call:
    """Bring the slots, with the decoded token among them, to their ranks."""
    if layer.rotation is None:
        return call
    held: Count = layer.used - 1
    if layer.ragged:
        held = (layer.positions[:, :, : layer.used] >= 0).sum(-1, keepdim=True) - 1
    turns, late = layer.state[SHIFT][:, :, : layer.used], _late(call, held)
    reach, query = _reach(layer, call, layer.used), call.query
    if late is not None:
        if layer.written is None:
            turns[:, :, -1:] = late
        else:
            turns.scatter_(2, layer.written, late.expand_as(layer.written))
        query = layer.rotation.turn(query, _by_query(late, query), reach)
    return replace(call, key=layer.rotation.turn(call.key, turns, reach), query=query)


def _late(call: Call, held: Count) -> Tensor | None:
    """How far the new tokens still have to be turned; None: not at all.

    Args:
        held: tokens kept before them.

    Returns:
        (batch or 1, kv_heads or 1, 1) float32.
    """
    start = call.fed.start
    if isinstance(start, Tensor):
        start = start.view(-1, 1, 1)
    late = held - start
    if isinstance(late, Tensor):
        return late.float()
    return None if late == 0 else torch.full((1, 1, 1), float(late), device=call.query.device)


def _by_query(late: Tensor, query: Tensor) -> Tensor:
    """Turns of the queries, which are the same for a KV head's group: (.., heads or 1, q_len)."""
    batch, heads, q_len, _ = query.shape
    if late.shape[1] > 1:
        late = late.repeat_interleave(heads // late.shape[1], 1)
    return late.expand(batch, -1, q_len)


def _reach(layer: SlotLayer, call: Call, slots: int) -> int:
    """The longest turn that there can be, known to the host."""
    layer.reach = max(layer.reach, call.fed.end, slots)
    return layer.reach
