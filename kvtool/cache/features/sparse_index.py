"""A layer with a reader, and its decode step: note the token, choose, gather, attend.

Nothing but the reader's estimate grows with what is stored. Batch entries of different lengths are
read together, where the reader can; each has pages of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvtool.cache.features.sparse_tables import Clock, Entries, FixedEntries, take_slots, widened
from kvtool.cache.features.trace import Trace
from kvtool.cache.features.traffic import TrafficBudgets
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import AttendsTokens, LayerSite, tensor_bytes
from kvtool.cache.steps.attend import call_weights, packed_attention
from kvtool.cache.steps.attend_triton import attend_chosen, can_run
from kvtool.cache.steps.block import Block
from kvtool.cache.steps.call import Call
from kvtool.kernels.checks import Family
from kvtool.maths.attention import group_queries, weighted_values
from kvtool.policies.parts import Read
from kvtool.policies.read.rows import PerRow, RowsView, fill_beyond, reads_together


class SparseIndex(AttendsTokens):
    """How decode steps read a part of the slots, from the end of a prompt to the next.

    Attributes:
        reader: as the policy has it, without the sizes of a prompt.
        entries: batch entries that are read alike; None: no tables have been made, all are read.
        selected: (batch, kv_heads, slots) positions that a score which selects without evicting has
            chosen at the end of the prompt, -1 at the end of batch entries with fewer; None: all.
    """

    name = "sparse_index"
    refusals: Mapping[str, str] = {
        "eager": "policy `{policy}` reads a part of the keys, and the own attention of `{model}` "
        "always reads all",
        "latents": "`{policy.reader.name}`",
        "shared": "reads a part of the keys",
        "joined": "its tables are made for the rows that were read together",
        "left_out": "policy `{policy}` cannot leave out a row among decoded tokens",
    }

    def __init__(self, reader: Read) -> None:
        self.reader = reader
        self.clear()

    @classmethod
    def make(cls, site: LayerSite) -> SparseIndex | None:
        reader = site.policy.reader
        reads_part = reader is not None and site.index >= reader.skip_layers
        return cls(reader) if reader is not None and reads_part else None

    def clear(self) -> None:
        self.entries: Sequence[Entries] | None = None
        self.selected: Tensor | None = None
        self.fixed: FixedEntries | None = None
        self.heads = 0  # that ask

    def take_block(self, layer: SlotLayer, call: Call, block: Block) -> Block:
        """Drop the tables: a prompt goes on."""
        self.entries = self.fixed = self.selected = None
        return block

    def select(self, positions: Tensor | None) -> None:
        """Choose among these tokens only, and those that come behind them."""
        self.selected = positions

    @torch.no_grad()
    def prepare(self, layer: SlotLayer, traffic: TrafficBudgets | None) -> None:
        """Lay out the slots for the reader and make its tables, unless they are there."""
        if self.entries is not None or not layer.is_initialized or traffic is None:
            return
        if layer.padded:
            counts = _align(layer)
            parts = [(slice(row, row + 1), count) for row, count in enumerate(counts)]
        else:
            parts = [(slice(0, layer.batch_size), layer.slots.used)]
        entries = [_entries(layer, self.selected, traffic, *each) for each in parts]
        keys, values = layer.slots.keys, layer.slots.values
        if layer.padded and reads_together(self.reader):
            entries = [Entries.side_by_side(entries, layer.slots.device)]
        for each in entries:
            each.build(keys[each.rows], values[each.rows])
        self.entries = entries

    def attend_token(self, layer: SlotLayer, call: Call) -> Tensor | None:
        self.heads = call.query.shape[1]
        slots, fixed = layer.slots, self.fixed
        if layer.seen_device is not None and fixed is not None:
            assert slots.written is not None, "static steps write where a tensor says"
            tokens = fixed.clock.tokens(layer.seen_device)
            clock, entries = fixed.clock, fixed.of
            entries.append_rows(slots.keys, slots.values, slots.written, tokens, clock.sizes)
            return _attend(entries, call, slots.keys, slots.values, clock, tokens)[0]
        if self.entries is None:
            return None
        return sparse_decode(layer, self.entries, call)

    def allows_static(self, layer: SlotLayer) -> bool:
        """Whether all rows are read together, and not all in full."""
        if Trace.name in layer.parts:
            return False
        together = self._together()
        return together is not None and together.sparse and reads_together(self.reader)

    @contextmanager
    def static_step(self, layer: SlotLayer, shared: dict[Any, Any]) -> Iterator[None]:
        entries, fixed, slots = self._together(), self.fixed, layer.slots
        assert entries is not None, "a static step was not allowed"
        capacity = slots.positions.shape[2]
        if fixed is None or fixed.of is not entries or fixed.capacity != capacity:
            fixed = FixedEntries(entries, layer.seen, capacity, slots.device, shared)
            self.fixed = fixed
        fixed.clock.begin()
        yield
        entries.count_token()
        layer.read(fixed.pairs_read(slots.keys, slots.values, self.heads))
        if layer.padded and slots.reserved is None:
            entries.settle()
            slots.fill_to(entries.longest + 1)
            slots.mark_for_reuse(entries.following(slots.kv_heads), static=False)

    def _together(self) -> Entries | None:
        """The entries of all rows, if these are read together."""
        return self.entries[0] if self.entries is not None and len(self.entries) == 1 else None

    def stationary(self) -> list[Tensor]:
        return [] if self.fixed is None else self.fixed.stationary()

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        self.fixed = None
        self.selected = None if self.selected is None else change(self.selected)
        if self.entries is not None:
            self.entries = _reordered(self.entries, change)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.selected is None else {"marked": self.selected}

    def check(self, file: Any, prefix: str, shape: Any, dtype: torch.dtype) -> None:
        name = f"{prefix}marked"
        if name not in file.left:
            return
        places = (torch.int64, torch.int32)
        marked = file.take(name, (file.batch, shape.kv_heads, None), places, -1, file.seen - 1)
        file.check_places(name, marked)
        counts = (marked >= 0).sum(-1)
        if (counts != counts[:, :1]).any() or (counts < 1).any():
            raise file.bad(name, "chooses unequal counts in the heads of a layer")

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.selected = tensors.get("marked")

    @property
    def nbytes(self) -> int:
        selected = [] if self.selected is None else [self.selected]
        tables = [tensor for entry in self.entries or [] for tensor in entry.tensors()]
        return tensor_bytes([*selected, *tables])


def _reordered(entries: Sequence[Entries], change: Callable[[Tensor], Tensor]) -> Sequence[Entries]:
    rows = change(torch.arange(entries[-1].rows.stop))
    if len(entries) == 1:
        return [entries[0].mapped(change, slice(0, len(rows)))]
    return [
        entries[old].mapped(torch.clone, slice(i, i + 1)) for i, old in enumerate(rows.tolist())
    ]


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
    layer: SlotLayer, allowed: Tensor | None, budgets: TrafficBudgets, rows: slice, stored: int
) -> Entries:
    lengths, selected = layer.lengths, None
    seen = layer.seen if lengths is None else int(lengths[rows.start])
    generated = max(0, seen - budgets.end(rows.start))
    if allowed is not None:
        chosen = allowed[rows].long()
        chosen = chosen[..., : int((chosen[0, 0] >= 0).sum())]
        new = torch.arange(stored - generated, stored, device=chosen.device)
        selected = torch.cat([chosen, new.expand(*chosen.shape[:2], -1)], 2)
    tokens = stored if selected is None else selected.shape[2]
    reader, budget = budgets.reader(layer, rows.start, stored - generated)
    return Entries(
        rows,
        [reader],
        prompts=[tokens - generated],
        budget=PerRow.one(budget),
        stored=PerRow.one(stored),
        tokens=PerRow.one(tokens),
        index=selected,
        basis=budgets.basis(layer),
    )


def sparse_decode(layer: SlotLayer, entries: Sequence[Entries], call: Call) -> Tensor:
    """Attend to what the reader chooses, for one new token: (batch, heads, 1, value_dim)."""
    out, read, slots = [], 0, layer.slots
    chosen: list[Tensor | None] = []
    keys, values = slots.keys, slots.values
    for each in entries:
        own = (keys, values) if len(entries) == 1 else (keys[each.rows], values[each.rows])
        each.append(*own)
        part, numbers, choice = _attend(each, call, *own, each, each.tokens)
        out.append(part)
        chosen.append(choice)
        read += numbers
    pair = keys.shape[-1] + values.shape[-1]
    layer.read(read / (slots.batch * slots.kv_heads * pair))
    trace = layer.parts.get(Trace.name)
    if isinstance(trace, Trace):
        trace.note_reads([_positions(layer, *each) for each in zip(entries, chosen, strict=True)])
    if layer.padded and slots.reserved is None and slots.written is not None:
        slots.fill_to(max(each.longest for each in entries) + 1)
        slots.mark_for_reuse(slots.written[..., 0] + 1, static=False)
    return out[0] if len(out) == 1 else torch.cat(out)


def _positions(layer: SlotLayer, entries: Entries, slots: Tensor | None) -> Tensor:
    """Positions of the tokens that were attended to, (rows, kv_heads, read), -1 = none."""
    positions = layer.slots.positions[entries.rows]
    if slots is None:
        return entries.candidates(positions[..., None])[..., 0]
    found = positions.gather(2, slots.flatten(2).clamp(min=0))
    return found.masked_fill(slots.flatten(2) < 0, -1)


@dataclass(frozen=True)
class _Chosen:
    """Slots that are read, None: all; how many numbers that reads; and what stands for the rest.

    None of the slots is -1 where they are `whole`.
    """

    slots: Tensor | None
    numbers: int
    weight: Tensor | None = None
    rest: Tensor | None = None
    whole: bool = False


def _attend(
    entries: Entries,
    call: Call,
    keys: Tensor,
    values: Tensor,
    counts: Entries | Clock,
    tokens: PerRow,
) -> tuple[Tensor, int, Tensor | None]:
    """Attend to what is chosen; return how many numbers that reads, and the slots, -1 for none.

    Args:
        counts: what counts: the entries, or the clock of static steps.
        tokens: how many there are to choose from.
    """
    query = call.query if len(call.query) == len(keys) else call.query[entries.rows]
    grouped = group_queries(query, keys.shape[1])[:, :, :, 0]
    choice = _choose(entries, call, grouped, keys, counts, tokens)
    slots, whole = choice.slots, choice.whole
    if slots is not None and entries.index is not None:
        there = slots if whole else slots.clamp(min=0)
        found = entries.index.gather(2, there.flatten(2)).view(there.shape)
        slots = found if whole else found.masked_fill(slots < 0, -1)
    if slots is None:
        out = _attend_pairs(call, query, entries.candidates(keys), entries.candidates(values))
    elif can_run(call, Family.SLOTS, operator=True):
        out = attend_chosen(call, query, keys, values, slots, padded=not whole)
    else:
        there = slots if whole else slots.clamp(min=0)  # a slot in use, whose numbers are finite
        mask = None if whole else (slots >= 0).flatten(1, -2)
        key, value = take_slots(there, keys, values)
        out = _attend_pairs(call, query, key, value, mask)
    if choice.weight is not None and choice.rest is not None:  # which stands for what is not read
        own = out.view(*grouped.shape[:3], -1)
        mixed = torch.lerp(choice.rest[:, :, None], own.float(), choice.weight[..., None])
        out = mixed.to(out.dtype).view_as(out)
    return out, choice.numbers, slots


def _choose(
    entries: Entries,
    call: Call,
    query: Tensor,
    keys: Tensor,
    counts: Entries | Clock,
    tokens: PerRow,
) -> _Chosen:
    dense, heads, budget = counts.dense, keys.shape[1], counts.budget
    pair, alike, every, numbers = keys.shape[-1] + call.value.shape[-1], tokens.alike, None, 0
    if alike and dense[0]:
        return _Chosen(None, len(keys) * heads * tokens.most * pair, whole=True)
    if any(dense):
        fits = zip(tokens.known, budget.known, dense, strict=True)
        whole = [min(count, most) for count, most, alone in fits if alone]
        every = torch.arange(max(whole), device=keys.device).expand(len(dense), heads, -1)
        every, numbers = fill_beyond(every, tokens), sum(whole) * heads * pair
        if all(dense):
            return _Chosen(every, numbers)
    most = tokens.most
    view = RowsView(
        query=query,
        keys=keys[:, :, :most] if entries.index is None else keys,
        tables=entries.tables or {},
        tokens=most,
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
        counts=tokens,
        sizes=counts.sizes,
    )
    if alike:
        found, lists = entries.readers[0].choose(view), len(keys) * heads
        pairs = lists * most if found.slots is None else found.slots.numel()
        numbers = found.estimate * lists + pairs * pair
        return _Chosen(found.slots, numbers, found.weight, found.rest, whole=True)
    choice = entries.rows_reader.choose_rows(view)
    slots, weight = choice.slots, choice.weight
    lists = slots[0, ..., 0].numel()
    sparse = zip(choice.pairs.known, choice.estimate, dense, strict=True)
    numbers += sum(n * lists * pair + looked * heads for n, looked, alone in sparse if not alone)
    if every is not None:
        width = max(every.shape[2], slots.shape[-1])
        every, slots = widened(every, width), widened(slots, width)
        alone = tokens.once("alone", lambda: tokens.tensor <= budget.tensor)
        by_query = slots.dim() == 4  # each query head of a group has its list
        of_lists, whole_rows = (alone[..., None], every[:, :, None]) if by_query else (alone, every)
        slots = torch.where(of_lists, whole_rows, slots)
        weight = None if weight is None else torch.where(alone, 1.0, weight)
    full = every is None and choice.pairs.lowest >= slots.shape[-1]
    return _Chosen(slots, numbers, weight, choice.rest, full)


def _attend_pairs(
    call: Call, query: Tensor, key: Tensor, value: Tensor, stands: Tensor | None = None
) -> Tensor:
    """Attend pairs, all of them or those that stand for a token: bool (rows, lists, pairs)."""
    if call.needs_weights:
        visible = None if stands is None else stands[:, :, None, None]
        if call.sinks is not None:
            call = replace(call, sinks=call.sinks.view(key.shape[1], -1))
        return weighted_values(call_weights(call, query, key, visible), value)
    mask = None if stands is None else stands[:, :, None]
    return packed_attention(query, key, value, mask, call.scale)
