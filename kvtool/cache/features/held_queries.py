"""Queries of a prompt that a layer holds until it is cut, for what repairs the kept tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import LayerSite, Part, tensor_bytes
from kvtool.cache.steps.block import Block
from kvtool.cache.steps.call import Call
from kvtool.maths.selection import take
from kvtool.policies.evidence import PromptQueries
from kvtool.policies.parts import SlotView

Span = tuple[int, int]


class HeldQueries(Part):
    """The last queries of a prompt, `rows` at most, from when it is attended until it is cut."""

    name = "held_queries"
    refusals: Mapping[str, str] = {
        "eager": "`{policy.on_evict.name}` looks back from queries, "
        "and the eager attention of `{model}` does not show them"
    }

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.clear()

    @classmethod
    def make(cls, site: LayerSite) -> HeldQueries | None:
        rows = site.policy.shown_queries
        return cls(rows) if rows else None

    def clear(self) -> None:
        self.seen: PromptQueries | None = None
        self._waits = False  # whether the prompt is cut when other layers have seen it

    def take(self, seen: PromptQueries) -> None:
        """Hold other queries than the prompt's."""
        self.seen = seen

    @torch.no_grad()
    def take_block(self, layer: SlotLayer, call: Call, block: Block) -> Block:
        own = last_queries(call, block.new, self.rows)
        if self.seen is not None:  # a prompt that waits comes in several forwards
            own = newest(joined(self.seen, own), self.rows)
        self.seen, self._waits = own, block.waiting is not None
        return block

    def give(self, view: SlotView) -> PromptQueries | None:
        """Give the queries away as the slots of a view are cut, by which the prompt ends."""
        seen = self.seen
        self.clear()
        return None if seen is None else replace(seen, slots=view.positions)

    def end_block(self) -> None:
        if not self._waits:
            self.clear()

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        seen = self.seen
        if seen is not None:
            spans = None if seen.spans is None else change(seen.spans)
            query, positions = change(seen.query), change(seen.positions)
            self.seen = replace(seen, query=query, positions=positions, spans=spans)

    @property
    def nbytes(self) -> int:
        seen = self.seen
        held = () if seen is None else (seen.query, seen.positions, seen.spans)
        return tensor_bytes([tensor for tensor in held if tensor is not None])


def last_queries(call: Call, new: Tensor, rows: int) -> PromptQueries:
    """Copy the last queries of each batch entry; `new`: (batch or 1, q_len) positions of all."""
    order = _latest(new, rows)
    return _queries(call, new, order, torch.ones_like(order, dtype=torch.bool))


def spread_queries(
    call: Call, new: Tensor, spans: Sequence[Span], chunk: Sequence[Span], rows: int
) -> PromptQueries:
    """Copy the queries of a chunk that lie at equal steps over all that is repeated.

    Args:
        new: as for `last_queries`; the last tokens of each entry are its chunk.
        spans: first and last position, excluded, of what is repeated of each batch entry.
        chunk: the same of what this call repeats.
    """
    chosen = []
    for (begin, end), (start, stop) in zip(spans, chunk, strict=True):
        count = min(rows, end - begin)
        steps = (begin + (2 * i + 1) * (end - begin) // (2 * count) for i in range(count))
        chosen.append([place - stop for place in steps if start <= place < stop])
    width = max(map(len, chosen))
    lines = [[*line, *[0] * (width - len(line))] for line in chosen]
    behind = torch.tensor(lines, device=new.device).view(len(lines), width)
    new = new.expand(len(lines), -1)
    tokens = _latest(new, new.shape[1])  # ascending, padding first
    order = tokens.gather(1, (behind + new.shape[1]).clamp(max=new.shape[1] - 1))
    return _queries(call, new, order, behind < 0)


def joined(before: PromptQueries, then: PromptQueries) -> PromptQueries:
    """Put queries behind others of the same layer."""
    both, spans = (before, then), None
    if any(seen.spans is not None for seen in both):
        spans = torch.cat([_spans(seen) for seen in both], 1)
    query = torch.cat([seen.query for seen in both], 2)
    positions = torch.cat([seen.positions for seen in both], 1)
    return replace(then, query=query, positions=positions, spans=spans)


def _spans(seen: PromptQueries) -> Tensor:
    """Spans of queries; one that has none sees itself in any case."""
    return seen.positions[..., None].expand(-1, -1, 2) if seen.spans is None else seen.spans


def newest(seen: PromptQueries, rows: int) -> PromptQueries:
    """Choose the last ones of each batch entry."""
    order = _latest(seen.positions, rows)
    query = take(seen.query, order[:, None].expand(-1, seen.query.shape[1], -1))
    spans = None if seen.spans is None else _rows(seen.spans, order)
    return replace(seen, query=query, positions=seen.positions.gather(1, order), spans=spans)


def _latest(positions: Tensor, rows: int) -> Tensor:
    """Index the last rows that hold a token, in their order, behind rows that hold none."""
    place = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    return torch.where(positions >= 0, place, -1).argsort(dim=1, stable=True)[:, -rows:]


def _queries(call: Call, new: Tensor, order: Tensor, there: Tensor) -> PromptQueries:
    """Copy queries of a call."""
    batch, heads = call.query.shape[:2]
    order = order.expand(batch, -1)
    positions = new.expand(batch, -1).gather(1, order).masked_fill(~there, -1)
    return PromptQueries(
        query=take(call.query, order[:, None].expand(-1, heads, -1)),
        positions=positions,
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
        spans=None if call.spans is None else _rows(call.spans, order),
    )


def _rows(spans: Tensor, order: Tensor) -> Tensor:
    return spans.gather(1, order[..., None].expand(-1, -1, 2))
