"""Repeat a prompt over a cache that holds it whole, and cut all layers by what that needed.

A repetition is attended and not stored: the cache stays as it is, but for recurrent layers, whose
state the caller rolls back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvtool.cache.features.head_budgets import HeadBudgets
from kvtool.cache.features.repetition import RepeatedWeights
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.steps.attend import call_weights
from kvtool.cache.steps.attend_block import attend_plain
from kvtool.cache.steps.block import Block, cut, note_scores
from kvtool.cache.steps.call import Call
from kvtool.cache.steps.view import make_view, score, used_view
from kvtool.maths.selection import take
from kvtool.policies.evidence import Repeated
from kvtool.policies.numbers import at_least_zero

_ROWS = 128  # queries whose weights are held at a time


def attend_repetition(layer: SlotLayer, call: Call, weights: RepeatedWeights) -> Tensor:
    """Attend tokens that are not stored, and note their weights on the tokens that they repeat.

    Returns:
        (batch, heads, q_len, value_dim).
    """
    block = _lay_out(layer, call)
    out = attend_plain(layer, call, block)
    if layer.window is None:
        _note_weights(layer, call, block, weights)
    return out


def _lay_out(layer: SlotLayer, call: Call) -> Block:
    """Lay out the slots and the tokens behind them; nothing is counted."""
    new, slots, device = call.positions, layer.slots, call.query.device
    if new is None:
        places = torch.arange(call.q_len, device=device)
        new = (layer.seen if layer.lengths is None else layer.lengths[:, None]) + places
        new = new.view(-1, call.q_len)
    kept = call.raw_key.shape[2] - call.q_len
    behind = new.to(torch.int32)[:, None].expand(slots.batch, slots.kv_heads, -1)
    positions = torch.cat([slots.positions[:, :, :kept], behind], 2)
    return Block(new, make_view(layer, (call.value,), positions, call.q_len), {}, kept)


def _note_weights(layer: SlotLayer, call: Call, block: Block, weights: RepeatedWeights) -> None:
    """Note the highest weight on each token of the chunk, of all queries and of a head's group.

    The softmax is over the first tokens, the chunk and the repetition up to the query.
    """
    kept, new = block.kept, block.new.expand(call.query.shape[0], -1)
    index, there = weights.slots(layer.slots.positions[:, 0, :kept], layer.padded)
    key = torch.cat([take(call.key[:, :, :kept], index[:, None]), call.key[:, :, kept:]], 2)
    valid, place = new >= 0, torch.arange(call.q_len, device=new.device)
    best: Tensor | None = None
    for start in range(0, call.q_len, _ROWS):
        rows = slice(start, start + _ROWS)
        own = (place <= place[rows, None]) & valid[:, None]
        seen = torch.cat([there[:, None].expand(-1, own.shape[1], -1), own], 2)[:, None, None]
        found = call_weights(call, call.query[:, :, rows], key, seen)[..., : index.shape[1]]
        top = found.masked_fill_(~valid[:, None, None, rows, None], 0).amax(3)
        best = top if best is None else torch.maximum(best, top)
    if best is not None:
        best = best.flatten(1, 2).unflatten(1, (layer.slots.kv_heads, -1)).amax(2)
        weights.add(layer.index, best, index, there, kept)


def cut_repeated(
    layers: Sequence[SlotLayer], weights: RepeatedWeights, spans: Sequence[tuple[int, int]]
) -> None:
    """Cut layers that hold a prompt whole, all at once, by the weights of its repetition.

    Args:
        layers: those of free budget.
        spans: first and last position, excluded, of what was repeated of each batch entry.
    """
    judged = []
    for layer in layers:
        part, used = HeadBudgets.of(layer), layer.slots.used_slots()
        if part is None:
            raise RuntimeError("heads that compete have budgets of their own")
        repeated = _repeated(layer, weights, spans, used.positions)
        view = replace(used_view(layer), repeated=repeated)
        evicted = at_least_zero(view.held - layer.budget.tokens)
        importance, protected = score(layer.policy, view, used.state, None, evicted)
        note_scores(layer, view, importance, protected)
        heads = part.heads_of(layer, view, importance, protected)
        judged.append((view, importance, protected, heads))
    split = HeadBudgets.of(layers[0])
    if split is None:
        raise RuntimeError("heads that compete have budgets of their own")
    tokens = split.split.tokens_of([heads for *_, heads in judged])
    for layer, (view, importance, protected, _), own in zip(layers, judged, tokens, strict=True):
        used = layer.slots.used_slots()
        counts = layer.slots.heads.own(own)
        cut(layer, view, used.state, None, importance, protected, counts)


def _repeated(
    layer: SlotLayer,
    weights: RepeatedWeights,
    spans: Sequence[tuple[int, int]],
    positions: Tensor,
) -> Repeated:
    starts, ends = (
        torch.tensor(each, device=positions.device)[:, None, None]
        for each in zip(*spans, strict=True)
    )
    return Repeated(weights.by_layer[layer.index], (positions >= starts) & (positions < ends))
