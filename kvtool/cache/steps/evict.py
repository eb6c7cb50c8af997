"""Evict for a decoded token: add its attention to the statistics, choose the slot to reuse.

A policy with a pace of its own cuts a layer back to its budget between decoded tokens. Evicted
tokens are separated from kept ones, and the policy may merge them or set them aside.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.cache.slots.buffers import Slots
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import CutSchedule
from kvtool.cache.slots.slot_form import Form, Stored
from kvtool.cache.steps.view import (
    choose_kept,
    held_slots,
    observe,
    score,
    used_state,
    used_view,
    with_empty_slots,
)
from kvtool.maths.selection import lowest, take
from kvtool.policies.evicted.eviction import Eviction
from kvtool.policies.evidence import AttentionRows
from kvtool.policies.numbers import State, half
from kvtool.policies.parts import SlotView
from kvtool.policies.rescore.caote import CAOTE
from kvtool.policies.scores.h2o import H2O
from kvtool.policies.scores.recency import Recency
from kvtool.policies.scores.scissorhands import Scissorhands
from kvtool.policies.scores.shared import Summing
from kvtool.policies.scores.streaming import Streaming


@torch.no_grad()
def part_block(
    layer: SlotLayer,
    slots: tuple[Tensor, Tensor] | None,
    view: SlotView,
    state: State,
    importance: Tensor,
    chosen: Tensor,
    positions: Tensor,
) -> Slots:
    """Copy what stays of a block and of the slots before it, changed by evicted tokens.

    Args:
        slots: keys and values of all, (batch, kv_heads, slots, dim); None: all are in use.
        view, state: the same slots as the policy sees them.
        importance: (batch, kv_heads, slots) float32 by which they were chosen.
        chosen: (batch, kv_heads, kept) indices of those that stay, in ascending position.
        positions: (batch, kv_heads, kept) their positions, -1 = empty.
    """
    stored = layer.slots.chosen(chosen, slots)
    kept = Slots(stored, positions, {k: t.gather(2, chosen) for k, t in state.items()})
    taking = layer.parts.at["take_evicted"]
    if taking:
        keys, values = layer.slots.dequantised() if slots is None else slots
        form = layer.slots.form
        kept_keys, kept_values = form.dequantise(stored)
        if form.codec is not None:  # changed before they are rounded
            kept_values = take(values, chosen)
        split = layer.budget.by_head
        fewest = layer.budget.min_budget if split is None else int(split.min())
        evicted, evicted_positions = _evicted_slots(view.positions, chosen, positions, fewest)
        eviction = Eviction(
            keys=keys,
            values=values,
            state=state,
            evicted=evicted,
            evicted_positions=evicted_positions,
            kept_keys=kept_keys,
            kept_values=kept_values,
            kept_state=kept.state,
            kept_positions=positions,
            tokens_seen=view.tokens_seen,
            layer=layer.index,
            heads=layer.slots.heads,
            whole=not layer.masked and split is None,
            importance=importance,
        )
        for part in taking:
            part.take_evicted(layer, view, eviction)
        if form.codec is not None and layer.policy.shown_queries:
            lost = (eviction.evicted_positions >= 0).any(-1)
            kept = kept._replace(stored=_changed_values(form, stored, kept_values, lost))
    for part in layer.parts.at["slots_left"]:
        part.slots_left(kept.state, view.positions, chosen)
    return kept


def _changed_values(form: Form, stored: Stored, values: Tensor, lost: Tensor) -> Stored:
    """Store changed values; heads that have lost no token keep what is stored."""
    new, heads = form.with_values(stored, values), lost[..., None, None]
    return {name: torch.where(heads, new[name], own) for name, own in stored.items()}


def _evicted_slots(
    positions: Tensor, chosen: Tensor, kept: Tensor, fewest: int
) -> tuple[Tensor, Tensor]:
    """Slots that are stored and not chosen, in ascending position."""
    stays = torch.zeros_like(positions, dtype=torch.bool).scatter_(2, chosen, kept >= 0)
    last = torch.iinfo(positions.dtype).max
    key = positions.masked_fill(stays | (positions < 0), last)
    evicted_positions, evicted = key.sort(-1)
    count = positions.shape[2] - min(fewest, chosen.shape[2])
    evicted_positions = evicted_positions[..., :count]
    return evicted[..., :count], evicted_positions.masked_fill(evicted_positions == last, -1)


@torch.no_grad()
def cut_to_budget(
    layer: SlotLayer, schedule: CutSchedule, view: SlotView, rows: AttentionRows | None
) -> None:
    """Cut the batch entries, or heads, that have reached their budget and the spare tokens.

    The others keep what they have. Where they differ, this costs two device syncs.

    Args:
        view: the slots in use.
        rows: the weights of the newest token, if the policy ranks by them.
    """
    budget = layer.budget.tokens
    target: int | Tensor = budget
    if isinstance(view.held, Tensor) or isinstance(budget, Tensor):
        held = torch.as_tensor(view.held)
        target = torch.where(held >= budget + schedule.spare, budget, held)
    used = layer.slots.used_slots()
    most = int(target.max()) if isinstance(target, Tensor) else target
    kept = choose_kept(layer.policy, view, used.state, rows, target, most)
    layer.slots.replace(part_block(layer, None, view, used.state, *kept))
    schedule.count(target, budget, layer.seen)


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
    for part in layer.parts.at["slot_left"]:
        part.slot_left(state, view.positions, evicted)
    for part in layer.parts.at["take_decoded"]:
        part.take_decoded([layer], view.positions.gather(2, evicted[..., None]))


_FEW = {False: 4096, True: 1024}  # slots that one program looks at, without and with their values
_RESCORES = (type(None), CAOTE)
_HOOKS = ("show", "slot_left", "take_decoded")


def choice_in_numbers(layer: SlotLayer) -> tuple[str, bool, list[int]] | None:
    """Say in numbers how the slot that the next token takes is chosen, in a layer that is full.

    Returns:
        What ranks the slots, whether CAOTE weighs it by the values, and newest and first tokens
        that stay, and the budget; None: the policy's own code chooses.
    """
    score, rescore, budget = layer.policy.score, layer.policy.rescore, layer.budget.tokens
    slots, recent, first = layer.slots, 0, 0
    own = slots.reserved is not None or any(layer.parts.at[hook] for hook in _HOOKS)
    if own or isinstance(budget, Tensor) or not layer.evicts_tokens:
        return None
    if not budget < slots.used <= _FEW[rescore is not None] or type(rescore) not in _RESCORES:
        return None
    if type(score) in (H2O, Scissorhands):
        assert isinstance(score, Summing), "as both are"
        by, recent = score.statistics[0], half(budget) if score.recent is None else score.recent
    elif type(score) in (Recency, Streaming):
        by, first = "position", score.sinks if isinstance(score, Streaming) else 0
    else:
        return None
    return by, rescore is not None, [recent, first, budget]


def _may_be_cut(layer: SlotLayer, schedule: CutSchedule) -> bool:
    """Whether a cut may come after the running token."""
    if schedule.until is None:
        slots, budget = layer.slots, layer.budget.tokens
        schedule.count(held_slots(layer, slots.positions[:, :, : slots.used]), budget, layer.seen)
    return schedule.left(layer.seen) == 0
