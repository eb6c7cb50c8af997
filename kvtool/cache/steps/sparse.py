"""The decode step of a layer with a reader: note the token, choose, gather, attend.

Nothing but the reader's estimate grows with what is stored. Batch entries of different
lengths are read together, where the reader can; each has its own pages, counted from its own
first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtool.cache.features.sparse_index import (
    Entries,
    IndexedEntries,
    PaddedEntries,
    SparseIndex,
    take_slots,
    widened,
)
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.steps.attend import call_weights, packed_attention
from kvtool.cache.steps.attend_triton import attend_chosen, can_run
from kvtool.cache.steps.call import Call
from kvtool.cache.traffic import TrafficBudgets
from kvtool.kernels.kind import Family
from kvtool.maths.attention import group_queries, weighted_values
from kvtool.policies.read.rows import RowsView, drop_beyond, reads_together
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
    entries = [_entries(layer, index, budgets, rows, stored) for rows, stored in parts]
    keys, values = layer.slots.keys, layer.slots.values
    if layer.padded and reads_together(index.reader):
        padded = PaddedEntries.of(entries, layer.slots.device)
        padded.build(keys, values)
        index.start([padded])
        return
    for each in entries:
        each.build(keys[each.rows], values[each.rows])
    index.start(entries)


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
    return IndexedEntries(
        rows, reader, budget, tokens - generated, stored, tokens, index=selected, basis=basis
    )


def sparse_decode(layer: SlotLayer, entries: Sequence[Entries], call: Call) -> Tensor:
    """Attend to what the reader chooses, for one new token that the layer has taken in.

    Returns:
        (batch, heads, 1, value_dim).
    """
    out, read, slots = [], 0, layer.slots
    chosen: list[Tensor | None] = []
    for each in entries:
        keys, values = slots.keys[each.rows], slots.values[each.rows]
        each.append(keys, values)
        part, numbers, choice = _attend_entries(each, call, keys, values)
        out.append(part)
        chosen.append(choice)
        read += numbers
    pair = slots.keys.shape[-1] + slots.values.shape[-1]
    layer.read(read / (slots.batch * slots.kv_heads * pair))
    for part in layer.parts.at["note_reads"]:
        part.note_reads([_positions(layer, *each) for each in zip(entries, chosen, strict=True)])
    if layer.padded and slots.written is not None:
        slots.fill_to(max(each.longest for each in entries) + 1)
        slots.mark_for_reuse(slots.written[..., 0] + 1, static=False)
    return out[0] if len(out) == 1 else torch.cat(out)


def _attend_entries(
    entries: Entries, call: Call, keys: Tensor, values: Tensor
) -> tuple[Tensor, int, Tensor | None]:
    """Attend to what is chosen: the output, how many numbers that reads, and which slots."""
    if isinstance(entries, PaddedEntries):
        return _attend_padded(entries, call, keys, values)
    if isinstance(entries, IndexedEntries):
        return _attend_rows(entries, call, keys, values)
    raise TypeError(f"no entries of a layer: {type(entries)}")


def _positions(layer: SlotLayer, entries: Entries, slots: Tensor | None) -> Tensor:
    """Positions of the tokens that were attended to, (rows, kv_heads, read), -1 = none."""
    positions = layer.slots.positions[entries.rows]
    if slots is None:
        return entries.candidates(positions[..., None])[..., 0]
    found = positions.gather(2, slots.flatten(2).clamp(min=0))
    return found.masked_fill(slots.flatten(2) < 0, -1)


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
    out = _with_rest(out, grouped, choice.weight, choice.rest)
    rows_and_heads = keys.shape[0] * keys.shape[1]
    pair = keys.shape[-1] + values.shape[-1]
    return out, choice.estimate * rows_and_heads + pairs * pair, slots


def _with_rest(out: Tensor, query: Tensor, weight: Tensor | None, rest: Tensor | None) -> Tensor:
    """Let what stands for the tokens that are not read have its part of the output."""
    if weight is None or rest is None:
        return out
    own = out.view(*query.shape[:3], -1)
    mixed = torch.lerp(rest[:, :, None], own.float(), weight[..., None])
    return mixed.to(out.dtype).view_as(out)


def _attend_padded(
    entries: PaddedEntries, call: Call, keys: Tensor, values: Tensor
) -> tuple[Tensor, int, Tensor]:
    """The same for rows of different lengths at once; of the slots, -1 stands for none."""
    grouped = group_queries(call.query, keys.shape[1])[:, :, :, 0]
    choice = _choose_padded(entries, call, grouped, keys)
    slots = choice.slots
    stands = slots >= 0
    if entries.index is not None:
        slots = entries.index.gather(2, slots.clamp(min=0).flatten(2)).view(slots.shape)
        slots = slots.masked_fill(~stands, -1)
    if can_run(call, Family.SLOTS):
        out = attend_chosen(call, call.query, keys, values, slots, padded=True)
    else:
        there = slots.clamp(min=0)  # a slot in use, whose numbers are finite
        key, value = take_slots(keys, there), take_slots(values, there)
        out = _attend_pairs(call, call.query, key, value, stands.flatten(1, -2))
    out = _with_rest(out, grouped, choice.weight, choice.rest)
    return out, choice.numbers, slots


@dataclass(frozen=True)
class _PaddedChoice:
    """Slots of all rows, those that read all included, and how many numbers that reads."""

    slots: Tensor
    numbers: int
    weight: Tensor | None = None
    rest: Tensor | None = None


def _choose_padded(
    entries: PaddedEntries, call: Call, query: Tensor, keys: Tensor
) -> _PaddedChoice:
    dense, tokens, heads = entries.dense, entries.tokens, keys.shape[1]
    pair = keys.shape[-1] + call.value.shape[-1]
    whole = [count for count, alone in zip(tokens.known, dense, strict=True) if alone]
    every = None
    if whole:
        every = torch.arange(max(whole), device=keys.device).expand(len(dense), heads, -1)
        every = drop_beyond(every, tokens)
    if every is not None and all(dense):
        return _PaddedChoice(every, sum(whole) * heads * pair)
    view = RowsView(
        query=query,
        keys=entries.candidates(keys) if entries.index is None else keys,
        tables=entries.tables or {},
        tokens=tokens,
        sizes=entries.sizes,
        scale=call.scale,
        softcap=call.softcap,
        sinks=None if call.sinks is None else call.sinks.view(heads, -1),
    )
    choice = entries.reader.choose_rows(view)
    slots, weight = choice.slots, choice.weight
    lists = slots[0, ..., 0].numel()
    sparse = zip(choice.pairs, choice.estimate, dense, strict=True)
    numbers = sum(n * lists * pair + looked * heads for n, looked, alone in sparse if not alone)
    if every is not None:
        width = max(every.shape[2], slots.shape[-1])
        every, slots = widened(every, width), widened(slots, width)
        alone = tokens.tensor <= entries.budget.tensor
        by_query = slots.dim() == 4  # each query head of a group has its list
        of_lists, whole_rows = (alone[..., None], every[:, :, None]) if by_query else (alone, every)
        slots = torch.where(of_lists, whole_rows, slots)
        weight = None if weight is None else torch.where(alone, 1.0, weight)
    return _PaddedChoice(slots, numbers + sum(whole) * heads * pair, weight, choice.rest)


def _attend_pairs(
    call: Call, query: Tensor, key: Tensor, value: Tensor, stands: Tensor | None = None
) -> Tensor:
    """Attend pairs, all of them or those that stand for a token: bool (rows, lists, pairs)."""
    if call.needs_weights:
        visible = None if stands is None else stands[:, :, None, None]
        return weighted_values(call_weights(call, query, key, visible), value)
    mask = None if stands is None else stands[:, :, None]
    return packed_attention(query, key, value, mask, call.scale)


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
