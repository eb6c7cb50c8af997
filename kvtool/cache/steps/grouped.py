"""Evict for all layers at once: in steady state they differ in content only, so they are stacked.

The positions and statistics of equal layers are batch entries of common tensors. Each layer leaves
its attention weights, and the last layer of a step runs the policy once for all. Keys and values
stay where they are.

Layers that are cut at a pace are decoded together and cut at once. Between two cuts a token is
appended, at positions that are written down at the cut before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import CutSchedule
from kvtool.cache.steps.evict import part_block
from kvtool.cache.steps.view import (
    choose_kept,
    make_view,
    observe,
    score,
    show_parts,
    stacked,
    used_keys,
    used_values,
    with_empty_slots,
)
from kvtool.maths.selection import lowest
from kvtool.policies.evidence import AttentionRows
from kvtool.policies.numbers import Count
from kvtool.policies.parts import SlotView


class LayerGroup:
    """Layers in the same steady state, in the order in which a forward runs them.

    Attributes:
        layers: of the group.
        joined: whether anything beside their slots has a say while a token is attended.
    """

    def __init__(self, layers: list[SlotLayer]) -> None:
        self.layers = layers
        self.joined = any(part.joins_decode for each in layers for part in each.parts.values())
        slots = [layer.slots for layer in layers]
        self._batch = slots[0].batch
        with torch.inference_mode(False):  # what is made inside it could not be written outside
            self._positions = torch.cat([each.positions for each in slots])
            self._state = {
                name: torch.cat([each.state[name] for each in slots]) for name in slots[0].state
            }
        index = torch.tensor([layer.index for layer in layers], device=slots[0].device)
        self._index = index.repeat_interleave(self._batch)[:, None, None]
        self._budget = _stacked_budget(layers)
        for i, each in enumerate(slots):
            own = slice(i * self._batch, (i + 1) * self._batch)
            state = {name: number[own] for name, number in self._state.items()}
            each.group(self._positions[own], state)
        self._values: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._begin()

    def _begin(self) -> None:
        """Prepare the slots of the next token."""
        slots = [layer.slots.reuse_slot for layer in self.layers]
        self._reuse(torch.cat([slot for slot in slots if slot is not None]), self._seen())

    def ungroup(self) -> None:
        """Let the layers decide alone again, on numbers of their own."""
        for layer in self.layers:
            layer.slots.ungroup()

    def add(
        self, layer: SlotLayer, values: Tensor, rows: AttentionRows | None, counted: bool
    ) -> None:
        """Take a layer's evidence; at the last layer, choose what every layer evicts next.

        Args:
            values: (batch, kv_heads, slots, value_dim) of the layer, by the heads that are cached.
            rows: the weights of the token being decoded, if the policy wants them.
            counted: whether they are in the statistics already.
        """
        if layer is self.layers[0]:
            self._values, self._rows = [], []
        self._values.append(values)
        if rows is not None:
            self._rows.append(rows.weights)
        if layer is self.layers[-1]:
            self._end(counted)
            self._values, self._rows = [], []

    def _end(self, counted: bool) -> None:
        """Choose what every layer evicts, from what all have left."""
        first = self.layers[0]
        policy, state, positions = first.policy, self._state, self._positions
        padded = first.lengths is not None
        visible = positions[:, :, None] >= 0 if padded else None
        rows = AttentionRows(torch.cat(self._rows), visible) if self._rows else None
        keys = used_keys(*self.layers)
        view = make_view(first, self._left(), positions, keys=keys)
        seen = self._seen() if padded else first.seen
        view = stacked(view, self._index, seen, self._budget)
        if policy.needs_all_rows and not counted and rows is not None:
            observe(policy, state, view, rows)
        importance, protected = score(policy, view, state, rows, 1)
        if padded:
            importance, protected = with_empty_slots(view, importance, protected)
        distinct = policy.ranking.distinct and policy.rescore is None
        evicted = lowest(importance, positions, protected, distinct)
        for layer, slot in zip(self.layers, evicted.split(self._batch), strict=True):
            layer.slots.mark_for_reuse(slot, static=False)
        for part in first.parts.at["take_decoded"]:
            part.take_decoded(self.layers, positions.gather(2, evicted[..., None]))
        for part in first.parts.at["slot_left"]:
            part.slot_left(state, positions, evicted)
        self._reuse(evicted, seen)

    def _left(self) -> Sequence[Tensor]:
        """Values of all layers: as they have left them, or what their codes stand for."""
        coded = self.layers[0].attends_codes
        return used_values(*self.layers) if coded else tuple(self._values)

    def _seen(self) -> Count:
        """Tokens of each batch entry of each layer so far."""
        first = self.layers[0]
        if first.lengths is None:
            return first.seen
        return first.lengths.repeat(len(self.layers))[:, None, None]

    def _reuse(self, evicted: Tensor, seen: Count) -> None:
        """Clear what is beside the slots to reuse and give them the position of the next token."""
        slot = evicted[..., None]
        if isinstance(seen, Tensor):
            self._positions.scatter_(2, slot, seen.to(torch.int32).expand_as(slot))
        else:
            self._positions.scatter_(2, slot, seen)
        for number in self._state.values():
            number.scatter_(2, slot, 0)


def _stacked_budget(layers: Sequence[SlotLayer]) -> Count:
    """What each batch entry of each layer may keep: one number where it is the same for all."""
    budgets = [layer.budget for layer in layers]
    if not any(isinstance(budget.tokens, Tensor) for budget in budgets):
        return budgets[0].tokens
    slots = layers[0].slots
    shape = (slots.batch, 1, 1)
    rows = [torch.as_tensor(each.tokens, device=slots.device).expand(shape) for each in budgets]
    return torch.cat(rows)


def may_pace(layer: SlotLayer) -> bool:
    """Whether a layer is cut every few tokens, and its buffers have reached their size.

    Where the tokens until its next cut are not counted yet, they are.
    """
    schedule, slots, budget = CutSchedule.of(layer), layer.slots, layer.budget.tokens
    if schedule is None or isinstance(budget, Tensor) or slots.reserved is not None:
        return False
    if schedule.until is None:
        schedule.count(slots.used, budget, layer.seen)
    return schedule.left(layer.seen) > 0 and slots.capacity >= budget + schedule.spare


class PacedGroup(LayerGroup):
    """Layers of the same policy and counts that are cut at the same tokens."""

    def ungroup(self) -> None:
        """Let the layers decide alone again, on numbers of their own."""
        self._positions[:, :, self.layers[0].slots.used :] = -1
        super().ungroup()

    def _begin(self) -> None:
        """Write down the positions of the tokens until the next cut."""
        first = self.layers[0]
        used, seen, schedule = first.slots.used, first.seen, CutSchedule.of(first)
        self._until = seen if schedule is None else seen + schedule.left(seen)
        coming = torch.arange(seen, self._until, device=self._positions.device)
        self._positions[:, :, used : used + len(coming)] = coming

    def _end(self, counted: bool) -> None:
        """Count the attention that all layers have left, and cut them if it is time."""
        first = self.layers[0]
        policy, used, cuts = first.policy, first.slots.used, first.seen >= self._until
        observed = policy.needs_all_rows and not counted
        if not (observed or cuts):
            return
        state = {name: number[:, :, :used] for name, number in self._state.items()}
        positions = self._positions[:, :, :used]
        keys = used_keys(*self.layers) if cuts else ()
        view = make_view(first, self._left(), positions, keys=keys)
        view = stacked(view, self._index, self._seen(), self._budget)
        rows = AttentionRows(torch.cat(self._rows)) if self._rows else None
        if observed and rows is not None:
            observe(policy, state, view, rows)
        if cuts:
            for layer in self.layers[1:]:
                view = show_parts(layer, view)
            self._cut(view, state, rows)

    @torch.no_grad()
    def _cut(self, view: SlotView, state: dict[str, Tensor], rows: AttentionRows | None) -> None:
        first = self.layers[0]
        budget = first.budget.max_budget
        kept = choose_kept(first.policy, view, state, rows, budget, budget)
        of_all = (view.positions, *kept)
        parts = zip(*(tensor.split(self._batch) for tensor in of_all), strict=True)
        for layer, (before, *own) in zip(self.layers, parts, strict=True):
            used, schedule = layer.slots.used_slots(), CutSchedule.of(layer)
            seen = replace(view, positions=before)
            layer.slots.replace(part_block(layer, None, seen, used.state, *own))
            if schedule is not None:
                schedule.count(budget, budget, layer.seen)
        self._begin()


class LayerGroups:
    """The groups of a cache's layers; none unless all layers are in their steady state.

    Attributes:
        formed: whether they are.
        by_layer: the group that a layer decides with, by the layer's index.
    """

    def __init__(self) -> None:
        self.formed = False
        self.by_layer: dict[int, LayerGroup] = {}

    def form(self, layers: list[SlotLayer], masked: bool) -> None:
        """Group the layers, if all of them that ever will are in their steady state.

        Layers that decide together do not look for padding in place of the coming token. Not for
        static steps, whose addresses stay.

        Args:
            masked: whether batch entries may have padding in the running forward.
        """
        if masked and layers[0].padded:
            self.ungroup()
            return
        if self.formed:
            return
        steady = [layer for layer in layers if layer.evicts_tokens]
        if not all(map(_is_steady, steady)):
            return
        alike = defaultdict(list)
        for layer in steady:
            slots, schedule = layer.slots, CutSchedule.of(layer)
            until = None if schedule is None else schedule.until
            budget, shape = layer.budget.max_budget, slots.positions.shape
            alike[layer.policy, budget, shape, slots.device, slots.used, until].append(layer)
        for members in alike.values():
            if len(members) > 1:
                paced = CutSchedule.of(members[0]) is not None
                group = PacedGroup(members) if paced else LayerGroup(members)
                self.by_layer |= {layer.index: group for layer in members}
        self.formed = True

    def ungroup(self) -> None:
        """Let every layer decide alone again: their slots are about to change."""
        for group in {id(group): group for group in self.by_layer.values()}.values():
            group.ungroup()
        self.formed, self.by_layer = False, {}


def _is_steady(layer: SlotLayer) -> bool:
    """Whether nothing but contents of slots changes with a token, or their count until a cut."""
    if layer.ragged is not None:
        return False
    if layer.padded and not all(part.joins_padded for part in layer.parts.values()):
        return False
    return layer.slots.reuse_slot is not None or may_pace(layer)
