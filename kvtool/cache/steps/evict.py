"""Evict for a decoded token: add its attention to the statistics, choose the slot to reuse."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn import functional

from kvtool.cache.steps.cut import cut_to_budget
from kvtool.cache.steps.evicted import evict_decoded, shift_behind
from kvtool.cache.steps.view import (
    held_slots,
    observe,
    score,
    used_state,
    used_view,
    with_empty_slots,
)
from kvtool.cache.storage.due import CutSchedule
from kvtool.cache.storage.layer import SlotLayer
from kvtool.maths.selection import lowest
from kvtool.policies.attention_rows import AttentionRows
from kvtool.policies.numbers import SHIFT


def evict_after_token(
    layer: SlotLayer, value: Tensor, rows: AttentionRows | None, *, counted: bool = False
) -> None:
    """Add the new row to the statistics and choose the slot that the next token overwrites.

    Args:
        value: (batch, heads of the attention, slots, value_dim).
        rows: the weights, if the policy wants them.
        counted: whether the row is in the statistics already.
    """
    policy, slots, budget = layer.policy, layer.slots, layer.budget
    observed = policy.needs_all_rows and not counted
    schedule = CutSchedule.of(layer) if layer.parts else None
    if schedule is None:
        full = layer.evicts_tokens and slots.used > budget.min_budget
    else:
        full = layer.seen_device is None and _may_be_cut(layer, schedule)
    if not (observed or full):
        return
    view, state = used_view(layer, value), used_state(layer)
    if observed and rows is not None:
        observe(policy, state, view, rows)
    if not full:
        return
    if schedule is not None:
        cut_to_budget(layer, schedule, view, rows)
        return
    if layer.padded and slots.used <= budget.max_budget:
        more = budget.max_budget + 1 - slots.used
        slots.fill_to(budget.max_budget + 1)
        value = functional.pad(value, (0, 0, 0, more))
        if rows is not None:
            rows = replace(rows, weights=functional.pad(rows.weights, (0, more)))
        view, state = used_view(layer, value), used_state(layer)
    importance, protected = score(policy, view, state, rows, 1)
    if layer.padded:
        importance, protected = with_empty_slots(view, importance, protected)
    distinct = policy.ranking.distinct and policy.rescore is None
    evicted = lowest(importance, view.positions, protected, distinct)
    slots.mark_for_reuse(evicted, static=layer.seen_device is not None)
    if SHIFT in state:
        shift_behind(state, view.positions, evicted)
    if layer.parts:
        evict_decoded(layer, view.tokens_seen)


def _may_be_cut(layer: SlotLayer, schedule: CutSchedule) -> bool:
    """Whether a cut may be due after the running token."""
    if schedule.until is None:
        slots, budget = layer.slots, layer.budget.tokens
        schedule.count(held_slots(layer, slots.positions[:, :, : slots.used]), budget, layer.seen)
    return schedule.left(layer.seen) == 0
