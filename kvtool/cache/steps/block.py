"""A block of a prompt behind the kept slots: laid out for the policy, stored, cut to the budget.

A cut leaves the same tokens in all heads, or to each head its own count. Column sums of a prompt's
attention that several caches want are made once for those of a kind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import CutsLater
from kvtool.cache.slots.ragged import to_ragged
from kvtool.cache.steps.evict import part_block
from kvtool.cache.steps.view import (
    make_view,
    observe,
    ordered,
    score,
    values_by_kv_head,
    vote_again,
)
from kvtool.errors import UsageError
from kvtool.maths.selection import keep_top
from kvtool.policies.evidence import AttentionRows
from kvtool.policies.numbers import PROMPT, Count, State, at_least_zero
from kvtool.policies.parts import Evidence, SlotView


def note_scores(
    layer: SlotLayer, view: SlotView, importance: Tensor, protected: Tensor | None
) -> None:
    """Show the scores by which a layer is cut to the parts that take note of them."""
    for part in layer.parts.at["note_scores"]:
        part.note_scores(importance, view.positions, protected)


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
        split: (batch, kv_heads) tokens of each head, where that is fixed; None: as the policy
            splits what the layer has.
    """
    if split is None and layer.parts.by_head is not None:
        split = layer.parts.by_head.split_heads(layer, view, importance, protected)
    if split is not layer.budget.by_head:
        layer.set_budget(layer.budget.split(split))
    if split is None:
        budget, most = layer.budget.tokens, layer.budget.max_budget
    else:
        budget, most = split[..., None], int(split.max())
    slots = min(most, view.positions.shape[2])
    order = ordered(layer.policy, view, importance, protected, budget)
    chosen, positions = keep_top(
        order, view.positions, budget, protected, slots, in_order=view.in_order
    )
    if layer.ragged is not None:
        own = {name: number.gather(2, chosen) for name, number in state.items()}
        kept = layer.ragged.taken(chosen, positions, own)
    else:
        kept = part_block(layer, joined, view, state, importance, chosen, positions)
    if split is not None:
        to_ragged(layer, kept)
    else:
        layer.slots.replace(kept)
        if layer.policy.two_stages:  # the whole prompt was stored
            layer.slots.shrink(layer.slots.used)
    return chosen


@dataclass(frozen=True)
class Block:
    """A block of new tokens behind the kept slots of a layer.

    Attributes:
        new: (batch or 1, q_len) int64 positions of the new tokens, -1 = padding.
        view: the kept slots and the block.
        state: the policy's numbers for them.
        kept: how many slots come before the block.
        waiting: takes the sums and scores of a block that is stored whole, and cut once all layers
            have seen the prompt. None: the layer is cut at the block's end.
        earlier: queries that vote beside the block's own, (batch, heads, rows, head_dim), and their
            positions, (batch or 1, rows); None: none do.
    """

    new: Tensor
    view: SlotView
    state: State
    kept: int
    waiting: CutsLater | None = None
    earlier: tuple[Tensor, Tensor] | None = None


def enter_block(
    layer: SlotLayer, q_len: int, positions: Tensor | None, raw_key: Tensor, value: Tensor
) -> Block:
    """Count the block's tokens and lay out the kept slots and the block as a policy sees them."""
    slots = layer.slots
    device = raw_key.device
    if positions is not None or layer.budget.by_head is not None:
        layer.count_apart(slots.batch, device)
    count: Count = q_len
    if layer.lengths is not None:
        if positions is None:
            new = layer.lengths[:, None] + torch.arange(q_len, device=device)
        else:
            new = positions.to(device)
        valid = (new >= 0).sum(1)
        count = valid[:, None, None]
        layer.enter_block(q_len, valid)
    else:
        layer.enter_block(q_len)
        new = torch.arange(layer.seen - q_len, layer.seen, device=device)[None]
    kept = raw_key.shape[2] - q_len
    stored = new.to(torch.int32)[:, None].expand(slots.batch, slots.kv_heads, q_len)
    if kept:
        stored = torch.cat([slots.positions[:, :, :kept], stored], 2)
    state = {
        name: functional.pad(number[:, :, :kept], (0, q_len))
        for name, number in slots.state.items()
    }
    if PROMPT in state:
        state[PROMPT][:, :, kept:] = (new >= 0)[:, None].float()
        _check_prompt(layer, state[PROMPT])
    keys = (raw_key,) if layer.policy.shows_keys else ()
    view = make_view(layer, (values_by_kv_head(layer, value),), stored, count, keys)
    if layer.lengths is None and slots.ordered:
        view = replace(view, in_order=True)
    later = layer.parts.later
    return Block(new, view, state, kept, later if later is not None and later.active else None)


def _check_prompt(layer: SlotLayer, prompt: Tensor) -> None:
    """Refuse a prompt that leaves no slot for a decoded token, where all of it stays: a sync."""
    count = prompt[:, 0].sum(-1).long()[:, None, None]
    over = count + 1 > layer.budget.tokens
    if bool(over.any()):
        row = int(over.flatten().long().argmax())
        budget = layer.budget.tokens
        own = int(budget[row]) if isinstance(budget, Tensor) else budget
        raise UsageError(
            f"policy `{layer.policy}` keeps the whole prompt: its {int(count[row])} tokens and one "
            f"that is generated exceed the budget of {own}",
            hint=f"a budget of {int(count[row]) + 1} tokens or more",
        )


def block_needs_all_rows(layer: SlotLayer, block: Block) -> bool:
    """Whether the policy, or what splits the budget, wants the weights of every query."""
    return layer.policy.needs_all_rows or block.waiting is not None


def block_needs_last_rows(layer: SlotLayer, block: Block) -> bool:
    """Whether the policy wants the last queries' weights: only if something has to go."""
    policy = layer.policy
    if policy.ranking.evidence is not Evidence.LAST_ROWS or policy.votes_again:
        return False
    return block.waiting is not None or _over_budget(layer, block)


def vote_weights(layer: SlotLayer, block: Block, rows: int) -> Tensor | None:
    """What the last queries' rows weigh, (batch or 1, rows); None: they come one by one."""
    above = block.view.above
    budget = layer.budget.tokens if above is None else above.budget
    weights = layer.policy.ranking.vote_weights(rows, budget)
    return None if weights is None else weights.to(block.new.device)


class RowWatcher:
    """Hands the rows of a block, as they come, to whoever wants all of them."""

    def __init__(self, layer: SlotLayer, block: Block) -> None:
        self._layer, self._block = layer, block
        self._sums: Tensor | None = None

    def see(self, rows: AttentionRows) -> None:
        """Take some of the block's rows."""
        view = self._block.view
        if self._layer.policy.needs_all_rows:
            observe(self._layer.policy, self._block.state, view, rows)
        if self._block.waiting is not None:
            if self._sums is None:
                slots = view.positions.shape[2]
                self._sums = rows.weights.new_zeros((*rows.weights.shape[:3], slots))
            self._sums[..., : rows.slots] += rows.weights.sum(3)

    def end(self) -> None:
        """Say that all rows have come."""
        waiting = self._block.waiting
        if self._sums is not None and waiting is not None:
            waiting.add(self._sums, self._block.view.block)


def leave_block(
    layer: SlotLayer, block: Block, raw_key: Tensor, raw_value: Tensor, rows: AttentionRows | None
) -> Tensor | None:
    """Store the block, and cut to the budget if it is over.

    Args:
        raw_key, raw_value: (batch, kv_heads, kept + q_len, dim), as stored.
        rows: the last rows, for a policy that wants them.

    Returns:
        (batch, kv_heads, slots) indices of what stays, in ascending position; None if everything
        stays.
    """
    if layer.policy.codec is not None:
        keys, values = raw_key[:, :, block.kept :], raw_value[:, :, block.kept :]
        layer.slots.fit(layer.index, keys, values, block.new, padded=layer.padded)
    view, waiting = block.view, block.waiting
    if waiting is not None:
        view, rows = vote_again(layer.policy, view, rows)
        importance, _ = score(layer.policy, view, block.state, rows, 0)
        waiting.wait(importance, view.block)
        store_block(layer, block, raw_key, raw_value)
        return None
    if not _over_budget(layer, block):
        store_block(layer, block, raw_key, raw_value)
        if layer.budget.by_head is not None:
            to_ragged(layer, layer.sorted_slots())
        return None
    split, by_head = None, layer.parts.by_head
    if by_head is not None:
        split = by_head.split_heads(layer, view, None, None)
    if split is not None:
        view = replace(view, budget=split[..., None])
    evicted = at_least_zero(view.held - (layer.budget.tokens if split is None else view.budget))
    view, rows = vote_again(layer.policy, view, rows)
    importance, protected = score(layer.policy, view, block.state, rows, evicted)
    note_scores(layer, view, importance, protected)
    if layer.policy.select_only:
        slots = min(layer.budget.max_budget, view.positions.shape[2])
        budget = layer.budget.tokens
        if layer.parts.attends is not None:
            chosen = keep_top(importance, view.positions, budget, protected, slots)
            layer.parts.attends.select(chosen[1])
        store_block(layer, block, raw_key, raw_value)
        return None
    return cut(layer, view, block.state, (raw_key, raw_value), importance, protected, split)


def store_block(layer: SlotLayer, block: Block, raw_key: Tensor, raw_value: Tensor) -> None:
    """Store the block behind the kept slots, cutting nothing."""
    new = slice(block.kept, None)
    keys, values = raw_key[:, :, new], raw_value[:, :, new]
    layer.slots.extend(keys, values, block.view.positions, block.state)


def _over_budget(layer: SlotLayer, block: Block) -> bool:
    score = layer.policy.ranking
    if score.when == "never" or score.layer_tokens == "same" or layer.budget.whole:
        return False
    if score.evidence.comes_later:
        return False
    if layer.budget.by_head is not None:
        return True  # heads that were cut are full, whatever the mean over all heads
    return block.view.positions.shape[2] > layer.budget.min_budget


class KnownColumns:
    """What caches that take in one step of a model have summed of its attention.

    Policies whose numbers are of the same names have the same numbers, whatever their budgets and
    whatever weighs or replaces their scores later.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, ...], bool], tuple[list[Tensor], Tensor | None]] = {}

    def give(self, layer: SlotLayer, block: Block) -> bool:
        """Add to a block's numbers what is known of them; False: those are not summed yet."""
        kind, waiting = _kind(layer, block), block.waiting
        if kind not in self._known:
            return False
        sums, by_head = self._known[kind]
        for name, total in zip(layer.policy.columns, sums, strict=True):
            block.state[name] += total
        if waiting is not None and by_head is not None:
            waiting.add(by_head.clone(), block.view.block)
        return True

    def note(self, layer: SlotLayer, block: Block) -> None:
        """Keep what a block of a whole prompt has just been given, for the caches to come."""
        waiting = block.waiting
        sums = [block.state[name].clone() for name in layer.policy.columns]
        self._known[_kind(layer, block)] = sums, None if waiting is None else waiting.sums


def _kind(layer: SlotLayer, block: Block) -> tuple[tuple[str, ...], bool]:
    """Return the names that are summed, and whether sums per query head are wanted beside them."""
    return layer.policy.columns, block.waiting is not None
