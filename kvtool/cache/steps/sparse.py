"""The decode step of a layer with a reader: note the token, choose, gather, attend.

Nothing but the reader's estimate grows with what is stored. Batch entries of different
lengths are read one by one: each has its own pages, counted from its own first token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.cache.budgets.traffic import TrafficBudgets
from kvtool.cache.steps.attend import call_weights, packed_attention
from kvtool.cache.steps.attend_triton import attend_chosen, can_run
from kvtool.cache.steps.call import Call
from kvtool.cache.storage.layer import SlotLayer
from kvtool.cache.storage.sparse_index import IndexedEntries, SparseIndex, take_slots
from kvtool.cache.storage.trace import Trace
from kvtool.kernels.kind import Family
from kvtool.maths.attention import group_queries, weighted_values
from kvtool.policies.read.view import Choice, ReadView


@torch.no_grad()
def build_index(layer: SlotLayer, budgets: TrafficBudgets) -> None:
    """Lay out a layer's slots for its reader and make the tables, once a prompt has ended."""
    index = SparseIndex.of(layer)
    if index is None or index.entries is not None:
        return
    if layer.padded:
        counts = _align(layer)
        parts = [(slice(row, row + 1), count) for row, count in enumerate(counts)]
    else:
        parts = [(slice(0, layer.batch_size), layer.slots.used)]
    index.start([_entries(layer, index, budgets, rows, stored) for rows, stored in parts])


def _align(layer: SlotLayer) -> list[int]:
    """Put token j of every batch entry into slot j, and let each go on behind its last."""
    slots = layer.slots
    slots.replace(layer.sorted_slots())
    counts = (slots.positions[:, 0, : slots.used] >= 0).sum(-1)
    known: list[int] = counts.tolist()
    slots.use(max(known))
    slots.fill_to(slots.used + 1)
    behind = counts[:, None].expand(-1, slots.kv_heads).contiguous()
    slots.mark_for_reuse(behind, static=False)
    return known


def _entries(
    layer: SlotLayer, index: SparseIndex, budgets: TrafficBudgets, rows: slice, stored: int
) -> IndexedEntries:
    lengths, selected = layer.lengths, None
    seen = layer.seen if lengths is None else int(lengths[rows.start])
    generated = max(0, seen - budgets.end(rows.start))
    if index.selected is not None:
        chosen = index.selected[rows].long()
        chosen = chosen[..., : int((chosen[0, 0] >= 0).sum())]
        new = torch.arange(stored - generated, stored, device=chosen.device)
        selected = torch.cat([chosen, new.expand(*chosen.shape[:2], -1)], 2)
    tokens = stored if selected is None else selected.shape[2]
    reader, budget = budgets.reader(layer, rows.start, stored - generated)
    basis = budgets.basis(layer)
    entries = IndexedEntries(
        rows, reader, budget, tokens - generated, stored, tokens, index=selected, basis=basis
    )
    entries.build(layer.slots.keys[rows], layer.slots.values[rows])
    return entries


def sparse_decode(layer: SlotLayer, entries: list[IndexedEntries], call: Call) -> Tensor:
    """Attend to what the reader chooses, for one new token that the layer has taken in.

    Returns:
        (batch, heads, 1, value_dim).
    """
    out, read, slots, chosen = [], 0, layer.slots, []
    for each in entries:
        keys, values = slots.keys[each.rows], slots.values[each.rows]
        each.append(keys, values)
        part, numbers, choice = _attend_rows(each, call, keys, values)
        out.append(part)
        chosen.append(choice)
        read += numbers
    pair = slots.keys.shape[-1] + slots.values.shape[-1]
    layer.read(read / (slots.batch * slots.kv_heads * pair))
    trace = Trace.of(layer)
    if trace is not None:
        trace.read([_positions(layer, *each) for each in zip(entries, chosen, strict=True)])
    if layer.padded and slots.written is not None:
        slots.fill_to(max(each.stored for each in entries) + 1)
        slots.mark_for_reuse(slots.written[..., 0] + 1, static=False)
    return out[0] if len(out) == 1 else torch.cat(out)


def _positions(layer: SlotLayer, entries: IndexedEntries, slots: Tensor | None) -> Tensor:
    """Positions of the tokens that were attended to, (rows, kv_heads, read)."""
    positions = layer.slots.positions[entries.rows]
    if slots is None:
        return entries.candidates(positions[..., None])[..., 0]
    return positions.gather(2, slots.flatten(2))


def _attend_rows(
    entries: IndexedEntries, call: Call, keys: Tensor, values: Tensor
) -> tuple[Tensor, int, Tensor | None]:
    """The output of some rows, (rows, heads, 1, value_dim), and what was read.

    That is how many numbers, and which slots, as `Choice` has them; None: all.
    """
    query = call.query[entries.rows]
    grouped = group_queries(query, keys.shape[1])[:, :, :, 0]
    choice = Choice(None) if entries.dense else _choose(entries, call, grouped, keys)
    slots = choice.slots
    if slots is not None and entries.index is not None:
        slots = entries.index.gather(2, slots.flatten(2)).view(slots.shape)
    if slots is not None and can_run(call, Family.SLOTS):
        out, pairs = attend_chosen(call, query, keys, values, slots), slots.numel()
    else:
        if slots is None:
            key, value = entries.candidates(keys), entries.candidates(values)
        else:
            key, value = take_slots(keys, slots), take_slots(values, slots)
        out, pairs = _attend_pairs(call, query, key, value), key[..., 0].numel()
    if choice.weight is not None and choice.rest is not None:
        own = out.view(*grouped.shape[:3], -1)
        mixed = torch.lerp(choice.rest[:, :, None], own.float(), choice.weight[..., None])
        out = mixed.to(out.dtype).view_as(out)
    rows_and_heads = keys.shape[0] * keys.shape[1]
    pair = keys.shape[-1] + values.shape[-1]
    return out, choice.estimate * rows_and_heads + pairs * pair, slots


def _attend_pairs(call: Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    if call.needs_weights:
        return weighted_values(call_weights(call, query, key, None), value)
    return packed_attention(query, key, value, None, call.scale)


def _choose(entries: IndexedEntries, call: Call, query: Tensor, keys: Tensor) -> Choice:
    sinks = None if call.sinks is None else call.sinks.view(query.shape[1], -1)
    view = ReadView(
        query=query,
        keys=entries.candidates(keys) if entries.index is None else keys,
        tables=entries.tables or {},
        tokens=entries.tokens,
        scale=call.scale,
        softcap=call.softcap,
        sinks=sinks,
    )
    return entries.reader.choose(view)
