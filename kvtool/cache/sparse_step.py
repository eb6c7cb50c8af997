"""The decode step of a layer with a reader: note the token, choose, gather, attend.

Nothing but the reader's estimate grows with what is stored. Rows of different lengths are read one
by one: each has its own pages, counted from its own first token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.cache.counting import attend_chosen, can_run
from kvtool.cache.kernels import Call, call_weights, packed_attention
from kvtool.cache.read_budgets import ReadBudgets
from kvtool.cache.reading import Reading, take_slots
from kvtool.cache.slots import SlotLayer
from kvtool.kernels.kind import Family
from kvtool.maths.attention import group_queries, weighted_values
from kvtool.policies.read.view import Choice, ReadView


@torch.no_grad()
def start_reading(layer: SlotLayer, budgets: ReadBudgets) -> None:
    """Lay out a layer's slots for its reader and make the tables, once a prompt has ended."""
    if layer.reader is None or layer.reading is not None:
        return
    batch = layer.batch_size
    if layer.ragged:
        counts = _align(layer)
        parts = [(slice(row, row + 1), count) for row, count in enumerate(counts)]
    else:
        parts = [(slice(0, batch), layer.used)]
    layer.reading = [_reading(layer, budgets, rows, stored) for rows, stored in parts]


def _align(layer: SlotLayer) -> list[int]:
    """Put token j of every row into slot j, and let each row go on behind its last."""
    layer.replace(*layer.sorted_slots())
    counts = (layer.positions[:, 0, : layer.used] >= 0).sum(-1)
    known = counts.tolist()
    layer.used = max(known)
    layer.fill_to(layer.used + 1)
    layer.pending = counts[:, None].expand(-1, layer.positions.shape[1]).contiguous()
    return known


def _reading(layer: SlotLayer, budgets: ReadBudgets, rows: slice, stored: int) -> Reading:
    seen = layer.seen if not layer.ragged else int(layer.lengths[rows.start])
    generated = max(0, seen - budgets.end(rows.start))
    index = None
    if layer.marked is not None:
        marked = layer.marked[rows].long()
        marked = marked[..., : int((marked[0, 0] >= 0).sum())]
        new = torch.arange(stored - generated, stored, device=marked.device)
        index = torch.cat([marked, new.expand(*marked.shape[:2], -1)], 2)
    tokens = stored if index is None else index.shape[2]
    keys, values = layer.keys[rows], layer.values[rows]
    reader, budget = budgets.reader(layer, rows.start, stored - generated)
    basis = budgets.basis(layer)
    reading = Reading(
        rows, reader, budget, tokens - generated, stored, tokens, index=index, basis=basis
    )
    reading.build(keys, values)
    return reading


def sparse_decode(layer: SlotLayer, call: Call) -> Tensor:
    """Attend to what the reader chooses, for one new token that the layer has taken in.

    Returns:
        (batch, heads, 1, value_dim).
    """
    out, read = [], 0
    for reading in layer.reading:
        keys, values = layer.keys[reading.rows], layer.values[reading.rows]
        reading.append(keys, values)
        part, numbers = _attend_rows(reading, call, keys, values)
        out.append(part)
        read += numbers
    pair = layer.keys.shape[-1] + layer.values.shape[-1]
    layer.pairs_read = read / (layer.keys.shape[0] * layer.keys.shape[1] * pair)
    if layer.ragged:
        layer.fill_to(max(reading.stored for reading in layer.reading) + 1)
        layer.pending = layer.written[..., 0] + 1
    return out[0] if len(out) == 1 else torch.cat(out)


def _attend_rows(reading: Reading, call: Call, keys: Tensor, values: Tensor) -> tuple[Tensor, int]:
    """The output of some rows, (rows, heads, 1, value_dim), and how many numbers were read."""
    query = call.query[reading.rows]
    grouped = group_queries(query, keys.shape[1])[:, :, :, 0]
    choice = Choice(None) if reading.dense else _choose(reading, call, grouped, keys)
    slots = choice.slots
    if slots is not None and reading.index is not None:
        slots = reading.index.gather(2, slots.flatten(2)).view(slots.shape)
    if slots is not None and can_run(call, Family.SLOTS):
        out, pairs = attend_chosen(call, query, keys, values, slots), slots.numel()
    else:
        if slots is None:
            key, value = reading.candidates(keys), reading.candidates(values)
        else:
            key, value = take_slots(keys, slots), take_slots(values, slots)
        out, pairs = _attend_pairs(call, query, key, value), key[..., 0].numel()
    if choice.weight is not None:
        own = out.view(*grouped.shape[:3], -1)
        mixed = torch.lerp(choice.rest[:, :, None], own.float(), choice.weight[..., None])
        out = mixed.to(out.dtype).view_as(out)
    rows_and_heads = keys.shape[0] * keys.shape[1]
    pair = keys.shape[-1] + values.shape[-1]
    return out, choice.estimate * rows_and_heads + pairs * pair


def _attend_pairs(call: Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    if call.needs_weights:
        return weighted_values(call_weights(call, query, key, None), value)
    return packed_attention(query, key, value, None, call.scale)


def _choose(reading: Reading, call: Call, query: Tensor, keys: Tensor) -> Choice:
    sinks = None if call.sinks is None else call.sinks.view(query.shape[1], -1)
    view = ReadView(
        query=query,
        keys=reading.candidates(keys) if reading.index is None else keys,
        tables=reading.tables,
        tokens=reading.tokens,
        scale=call.scale,
        softcap=call.softcap,
        sinks=sinks,
    )
    return reading.reader.choose(view)
