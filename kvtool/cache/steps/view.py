"""The slots of a layer as a policy sees them, and what the policy says of them.

Keys and values of the slots in use are dequantised when the policy reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import CutSchedule
from kvtool.maths.attention import attention_weights, visible_keys
from kvtool.maths.columns import add_columns
from kvtool.maths.selection import keep_top
from kvtool.policies.evidence import AttentionRows
from kvtool.policies.numbers import PROMPT, Count, State
from kvtool.policies.parts import Evidence, SlotView
from kvtool.policies.policy import Policy


class Dequantised(Sequence[Tensor]):
    """Keys or values of layers in float, a layer at a time, so that no more is held."""

    def __init__(self, layers: Sequence[SlotLayer], *, keys: bool) -> None:
        self._layers, self._keys = layers, keys

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: Any) -> Any:
        return _dequantised(self._layers[index], self._keys)


def used_keys(*layers: SlotLayer) -> Sequence[Tensor]:
    """The keys in the slots in use of each layer; none where the policy does not look at them."""
    return _of_layers(layers, keys=True) if layers[0].policy.shows_keys else ()


def used_values(*layers: SlotLayer) -> Sequence[Tensor]:
    """The values in the slots in use of each layer."""
    return _of_layers(layers, keys=False)


def _of_layers(layers: Sequence[SlotLayer], *, keys: bool) -> Sequence[Tensor]:
    if layers[0].policy.codec is not None and not torch.compiler.is_compiling():
        return Dequantised(layers, keys=keys)
    return tuple([_dequantised(layer, keys) for layer in layers])


def _dequantised(layer: SlotLayer, keys: bool) -> Tensor:
    slots = layer.slots
    stored, form = slots.used_stored(), slots.form
    return form.dequantise_keys(stored) if keys else form.dequantise_values(stored)


def make_view(
    layer: SlotLayer,
    values: Sequence[Tensor],
    positions: Tensor,
    block: Count = 1,
    keys: Sequence[Tensor] = (),
) -> SlotView:
    """Lay out slots of a layer, or of several in the same state, for the policy.

    Args:
        layer: or the first one.
        values: (batch, heads of the attention, slots, value_dim) of each layer.
        positions: (batch, kv_heads, slots) of all, -1 = empty.
        block: tokens of each batch entry in the running block.
        keys: (batch, kv_heads, slots, key_dim) of each layer, for a policy that needs them.
    """
    plain = layer.lengths is None and layer.seen_device is None
    view = SlotView(
        values=values,
        positions=positions,
        tokens_seen=layer.seen if plain else layer.tokens_seen,
        budget=layer.budget.tokens,
        held=held_slots(layer, positions),
        layer=layer.index,
        heads=layer.slots.heads,
        block=block,
        keys=keys,
    )
    return show_parts(layer, view) if layer.parts else view


def show_parts(layer: SlotLayer, view: SlotView) -> SlotView:
    """Add to a view what the policy sees of the layer's parts."""
    for part in layer.parts.at["show"]:
        view = part.show(layer, view)
    return view


def used_view(layer: SlotLayer, value: Tensor | None = None) -> SlotView:
    """The slots in use as a policy sees them.

    Args:
        value: as they are attended, (batch, heads of the attention, slots, value_dim); None: as
            they are stored.
    """
    positions = layer.slots.positions[:, :, : layer.slots.used]
    if value is None or layer.attends_codes:
        values = used_values(layer)
    else:
        values = (values_by_kv_head(layer, value),)
    return make_view(layer, values, positions, keys=used_keys(layer))


def used_state(layer: SlotLayer) -> State:
    """The policy's numbers for the slots in use."""
    used = layer.slots.used
    return {name: number[:, :, :used] for name, number in layer.slots.state.items()}


def held_slots(layer: SlotLayer, positions: Tensor) -> Count:
    """Stored slots of each batch entry, or of each head where heads hold different counts."""
    if layer.budget.by_head is not None:
        return (positions >= 0).sum(-1, keepdim=True)
    if layer.lengths is None:
        return positions.shape[2]
    return (positions[:, :1] >= 0).sum(-1, keepdim=True)


def values_by_kv_head(layer: SlotLayer, value: Tensor) -> Tensor:
    """Values by the heads that are cached: latent attention caches one for all heads."""
    kv_heads = layer.slots.kv_heads
    if value.shape[1] == kv_heads or layer.policy.rescore is None:
        return value
    batch, heads, slots, dim = value.shape
    grouped = value.view(batch, kv_heads, heads // kv_heads, slots, dim)
    return grouped.transpose(2, 3).reshape(batch, kv_heads, slots, -1)


def make_rows(
    layer: SlotLayer, weights: Tensor, visible: Tensor | None, valid: Tensor | None
) -> AttentionRows:
    """Weights by the heads that are cached; rows of padding count for nothing."""
    batch, _, _, q_len, keys = weights.shape
    weights = weights.reshape(batch, layer.slots.kv_heads, -1, q_len, keys)
    if valid is not None:
        weights = weights * valid[:, None, None, :, None]
    return AttentionRows(weights, visible, valid)


def decode_needs_rows(layer: SlotLayer) -> bool:
    """Whether the policy wants the weights of the token being decoded."""
    policy = layer.policy
    if policy.needs_all_rows:
        return True
    evidence = policy.ranking.evidence
    if not layer.evicts_tokens or evidence is Evidence.NOTHING or policy.shows_keys:
        return False
    schedule = CutSchedule.of(layer)
    if schedule is None:
        return layer.slots.used > layer.budget.min_budget
    return layer.seen_device is None and schedule.left(layer.seen) == 0


def decode_rows(layer: SlotLayer, weights: Tensor, positions: Tensor | None) -> AttentionRows:
    """The weights of a decoded token as evidence."""
    slots = layer.slots
    visible = None
    if layer.lengths is not None or slots.reserved is not None:
        visible = slots.positions[:, :, None, : slots.used] >= 0
    if positions is not None:
        return make_rows(layer, weights, visible, positions >= 0)
    batch, heads, _, _, keys = weights.shape
    if heads != slots.kv_heads:  # of the attention, where latents are stored
        weights = weights.reshape(batch, slots.kv_heads, -1, 1, keys)
    return AttentionRows(weights, visible)


def observe(policy: Policy, state: State, view: SlotView, rows: AttentionRows) -> None:
    """Add attention rows to the numbers beside the slots, in place."""
    if policy.columns:
        sums = {name: state[name] for name in policy.columns}
        add_columns(sums, rows.weights, rows.visible, rows.valid)
    if policy.observes_rows:
        policy.ranking.observe(state, view, rows)


def vote_again(
    policy: Policy, view: SlotView, rows: AttentionRows | None
) -> tuple[SlotView, AttentionRows | None]:
    """Let the newest queries of each layer look at all its slots, where the policy asks for that.

    Returns:
        The view and the rows by which the slots are ranked: as they came where it does not ask.
    """
    if not policy.votes_again:
        return view, rows
    weights, seen = [], []
    places = view.positions.chunk(len(view.keys))
    for keys, newest, positions in zip(view.keys, view.queries, places, strict=True):
        query, valid = newest.by_kv_head(keys.shape[1])
        assert newest.positions is not None, "a prompt has been seen"
        visible = visible_keys(newest.positions, positions)
        found = attention_weights(
            query.to(keys.dtype),
            keys,
            scale=newest.scale,
            visible=visible,
            softcap=newest.softcap,
            sinks=newest.sinks_by_kv_head(keys.shape[1]),
        )
        weights.append(found * valid[:, None, None, :, None])
        seen.append(visible[:, :, 0])
    rows = AttentionRows(torch.cat(weights), torch.cat(seen))
    return replace(view, block=policy.ranking.window), rows


def ordered(
    policy: Policy, view: SlotView, importance: Tensor, protected: Tensor | None, budget: Count
) -> Tensor:
    """Return the numbers by which slots are kept: importance, by runs or anew in a head's budget.

    Args:
        budget: of each head.
    """
    if policy.selecting is not None:
        return policy.selecting.order(importance, view, protected).expand_as(importance)
    if policy.rescoring_at_cut is None:
        return importance
    if protected is not None:
        importance = importance.masked_fill(protected, float("inf"))
    return policy.rescoring_at_cut.rescore(importance, replace(view, budget=budget))


def choose_kept(
    policy: Policy,
    view: SlotView,
    state: State,
    rows: AttentionRows | None,
    target: Count,
    most: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the slots that stay of those in use.

    Args:
        target: how many of each entry or head; `most` is the largest.

    Returns:
        The importance of all, and indices and positions of those that stay, in ascending position.
    """
    view, rows = vote_again(policy, view, rows)
    importance, protected = score(policy, view, state, rows, view.held - target)
    order = ordered(policy, view, importance, protected, target)
    return importance, *keep_top(order, view.positions, target, protected, most)


def score(
    policy: Policy, view: SlotView, state: State, rows: AttentionRows | None, evicted: Count
) -> tuple[Tensor, Tensor | None]:
    """Ask a policy what matters.

    Args:
        rows: the weights that it ranks by, if it does.
        evicted: how many slots will be evicted.

    Returns:
        The importance of each slot, (batch, kv_heads, slots) float32, higher = keep, and bool of
        the same shape, which slots stay whatever theirs is; None: none.
    """
    importance = policy.ranking.importance(state, view, rows)
    if policy.rescoring is not None:
        importance = policy.rescoring.rescore(importance, view)
    protected = policy.ranking.protected(state, view, evicted)
    if PROMPT in state:
        prompt = state[PROMPT] > 0
        protected = prompt if protected is None else protected | prompt
    return importance.expand_as(view.positions), protected


def with_empty_slots(
    view: SlotView, importance: Tensor, protected: Tensor | None, coming: Count = 0
) -> tuple[Tensor, Tensor | None]:
    """Let batch entries below their budget take an empty slot, and those above it evict one.

    Args:
        coming: tokens of each batch entry that are not among its slots yet.

    Returns:
        Importance and protection with which the lowest slot is the one to write over.
    """
    empty = view.positions < 0
    over = view.held + coming > view.budget
    importance = importance.masked_fill(empty & ~over, float("-inf"))
    unused = empty & over
    return importance, unused if protected is None else (protected & over) | unused


def last_query_columns(layer: SlotLayer, view: SlotView, new: Tensor) -> Tensor:
    """Index of the last queries of each batch entry that a policy sees: (batch or 1, rows).

    Args:
        view: of the block that they are in.
        new: (batch or 1, q_len) positions of all queries, -1 = padding.
    """
    budget = layer.budget.max_budget if view.above is None else view.above.budget
    most = int(budget.max()) if isinstance(budget, Tensor) else budget
    count = min(layer.policy.ranking.voters(most), new.shape[1])
    place = torch.arange(new.shape[1], device=new.device)[None]
    if layer.padded:
        place = torch.where(new >= 0, place, -1).argsort(-1)
    return place[:, -count:]


def stacked(view: SlotView, layer: Tensor, seen: Count, budget: Count) -> SlotView:
    """Return the same view of several layers, one behind the other.

    Args:
        layer: (batch, 1, 1) the index of each batch entry's layer.
        seen: tokens of each batch entry so far.
        budget: what each may keep.
    """
    return replace(view, layer=layer, tokens_seen=seen, budget=budget)
