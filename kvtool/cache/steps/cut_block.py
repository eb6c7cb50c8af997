"""Cut the slots of a prompt to the budget: what stays of all heads, or of each its own count."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvtool.cache.steps.evicted import part_block
from kvtool.cache.steps.view import used_view
from kvtool.cache.storage.deferred_cut import Deferred
from kvtool.cache.storage.head_budgets import HeadBudgets
from kvtool.cache.storage.last_queries import LastQueries
from kvtool.cache.storage.layer import SlotLayer
from kvtool.cache.storage.ragged import to_ragged
from kvtool.cache.storage.trace import Trace
from kvtool.maths.selection import keep_top
from kvtool.policies.allocate.problem import Heads
from kvtool.policies.numbers import State, at_least_zero
from kvtool.policies.parts import SlotView


def cut_deferred(layer: SlotLayer) -> None:
    """Cut what was deferred to the budget that the layer has got meanwhile."""
    part, heads = Deferred.of(layer), HeadBudgets.of(layer)
    scores = None if part is None else part.end()
    layer.grow_exactly(False)
    split = heads is not None and heads.tokens is not None
    if scores is None or (layer.slots.used <= layer.budget.min_budget and not split):
        return
    used = layer.slots.used_slots()
    view = replace(used_view(layer), block=scores.block)
    evicted = at_least_zero(view.held - layer.budget.tokens)
    protected = layer.policy.ranking.protected(used.state, view, evicted)
    trace_scores(layer, view, scores.importance, protected)
    cut(layer, view, used.state, None, scores.importance, protected)
    if layer.ragged is None:
        layer.slots.shrink(layer.slots.used + layer.policy.spare)


def trace_scores(
    layer: SlotLayer, view: SlotView, importance: Tensor, protected: Tensor | None
) -> None:
    """Note the scores by which a layer is cut, where they are shown."""
    trace = Trace.of(layer)
    if trace is not None:
        trace.judge(importance, view.positions, protected)


def cut(
    layer: SlotLayer,
    view: SlotView,
    state: State,
    joined: tuple[Tensor, Tensor] | None,
    importance: Tensor,
    protected: Tensor | None,
    split: Tensor | None = None,
) -> Tensor:
    """Store what stays of (batch, kv_heads, slots), and return its indices.

    Args:
        joined: keys and values of all; None: all are in slots.
        split: (batch, kv_heads) tokens of each head, where that is settled; None: as the policy
            splits what the layer has.
    """
    part = HeadBudgets.of(layer)
    if split is None:
        split = _split_heads(layer, view, importance, protected)
    if part is not None:
        part.assign(split)
    if split is None:
        budget, most = layer.budget.tokens, layer.budget.max_budget
    else:
        budget, most = split[..., None], int(split.max())
    slots, order = min(most, view.positions.shape[2]), importance
    select = layer.policy.selecting
    if select is not None:
        order = select.order(importance, view, protected).expand_as(importance)
    chosen, positions = keep_top(order, view.positions, budget, protected, slots)
    kept = part_block(layer, joined, view, state, importance, chosen, positions)
    if split is not None:
        to_ragged(layer, kept)
    else:
        layer.slots.replace(kept)
        if LastQueries.of(layer) is not None:  # the whole prompt was stored
            layer.slots.shrink(layer.slots.used)
    return chosen


def _split_heads(
    layer: SlotLayer, view: SlotView, importance: Tensor, protected: Tensor | None
) -> Tensor | None:
    """What each KV head may keep, (batch, kv_heads); None: all the same."""
    part = HeadBudgets.of(layer)
    if part is None:
        return None
    part.assign(None)
    if view.positions.shape[1] * layer.slots.heads.processes == 1:
        return None
    return layer.slots.heads.own(
        part.split.tokens(heads_of(layer, part, view, importance, protected))
    )


def heads_of(
    layer: SlotLayer,
    part: HeadBudgets,
    view: SlotView,
    importance: Tensor,
    protected: Tensor | None,
) -> Heads:
    """What a split of a layer's budget goes by, of all heads in all processes."""
    heads = layer.slots.heads
    return Heads(
        budget=layer.budget.tokens,
        importance=heads.all(importance, 0),
        positions=heads.all(view.positions, -1),
        protected=None if protected is None else heads.all(protected, False),
        min_free=not layer.appends,
        tokens_seen=view.tokens_seen,
        rank=None if part.rank is None else part.rank.to(view.positions.device),
        of=part.ranked,
    )
