"""Decode layers together that are cut every so many tokens, and cut them all at once.

Between two cuts a token is appended, at positions that are written down at the cut before, so that
a step does no more than attend and add up what its policy counts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvtool.cache.steps.decoded import used_keys
from kvtool.cache.steps.evicted import part_block
from kvtool.cache.steps.grouped import LayerGroup
from kvtool.cache.steps.view import make_view, observe, score, stacked
from kvtool.cache.storage.due import CutSchedule
from kvtool.cache.storage.layer import SlotLayer
from kvtool.cache.storage.query_window import QueryWindow
from kvtool.maths.selection import keep_top
from kvtool.policies.attention_rows import AttentionRows
from kvtool.policies.parts import SlotView


def may_pace(layer: SlotLayer) -> bool:
    """Whether a layer is cut every so many tokens, and its buffers have reached their size.

    Where nobody has counted the tokens until its next cut, they are.
    """
    due, slots, budget = CutSchedule.of(layer), layer.slots, layer.budget.tokens
    if due is None or isinstance(budget, Tensor) or slots.reserved is not None:
        return False
    if due.until is None:
        due.count(slots.used, budget, layer.seen)
    return due.left(layer.seen) > 0 and slots.capacity >= budget + due.spare


class PacedGroup(LayerGroup):
    """Layers of the same policy and counts that are cut at the same tokens."""

    def ungroup(self) -> None:
        """Let the layers decide alone again, on numbers of their own."""
        self._positions[:, :, self.layers[0].slots.used :] = -1
        super().ungroup()

    def _begin(self) -> None:
        """Write down the positions of the tokens until the next cut."""
        first = self.layers[0]
        used, seen, due = first.slots.used, first.seen, CutSchedule.of(first)
        self._until = seen if due is None else seen + due.left(seen)
        coming = torch.arange(seen, self._until, device=self._positions.device)
        self._positions[:, :, used : used + len(coming)] = coming

    def _end(self, counted: bool) -> None:
        """Count the attention that all layers have left, and cut them if that is due."""
        first = self.layers[0]
        policy, used, due = first.policy, first.slots.used, first.seen >= self._until
        observed = policy.needs_all_rows and not counted
        if not (observed or due):
            return
        state = {name: number[:, :, :used] for name, number in self._state.items()}
        positions = self._positions[:, :, :used]
        keys = used_keys(*self.layers) if due else ()
        view = make_view(first, self._left(), positions, keys=keys)
        view = stacked(view, self._index, self._seen(), self._budget)
        rows = AttentionRows(torch.cat(self._rows)) if self._rows else None
        if observed and rows is not None:
            observe(policy, state, view, rows)
        if due:
            windows = [QueryWindow.of(layer) for layer in self.layers]
            queries = tuple(window for window in windows if window is not None)
            self._cut(replace(view, queries=queries), state, rows)

    @torch.no_grad()
    def _cut(self, view: SlotView, state: dict[str, Tensor], rows: AttentionRows | None) -> None:
        first = self.layers[0]
        budget = first.budget.max_budget
        importance, protected = score(first.policy, view, state, rows, view.held - budget)
        kept = keep_top(importance, view.positions, budget, protected, budget)
        of_all = (importance, view.positions, *kept)
        parts = zip(*(tensor.split(self._batch) for tensor in of_all), strict=True)
        for layer, (own, before, chosen, positions) in zip(self.layers, parts, strict=True):
            used, due = layer.slots.used_slots(), CutSchedule.of(layer)
            seen = replace(view, positions=before)
            slots = part_block(layer, None, seen, used.state, own, chosen, positions)
            layer.slots.replace(slots)
            if due is not None:
                due.count(budget, budget, layer.seen)
        self._begin()
