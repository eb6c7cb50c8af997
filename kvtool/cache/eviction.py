"""What a step shows to the policy and does with its answer: count, observe, choose, free slots."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.cache.departure import close_rank, close_ranks, part_block, part_decoded
from kvtool.cache.lanes import split_lanes
from kvtool.cache.slots import SlotLayer
from kvtool.maths.selection import keep_top, lowest
from kvtool.policies.allocate.problem import Heads
from kvtool.policies.attention_rows import AttentionRows
from kvtool.policies.numbers import Count, State, at_least_zero
from kvtool.policies.parts import Evidence, SlotView


@dataclass(frozen=True)
class Block:
    """A block of new tokens behind the kept slots of a layer.

    Attributes:
        new: (batch or 1, q_len) int64 positions of the new tokens, -1 = padding.
        view: the kept slots and the block.
        state: the policy's numbers for them.
        kept: how many slots come before the block.
    """

    new: Tensor
    view: SlotView
    state: State
    kept: int


def enter_block(
    layer: SlotLayer, q_len: int, positions: Tensor | None, raw_key: Tensor, value: Tensor
) -> Block:
    """Count the block's tokens and lay out the kept slots and the block as a policy sees them."""
    batch, heads, total = layer.positions.shape[0], layer.positions.shape[1], raw_key.shape[2]
    device = raw_key.device
    uneven = positions is not None or layer.head_budgets is not None
    if uneven and not layer.ragged:
        layer.lengths = torch.full((batch,), layer.seen - q_len, device=device)
    count: Count = q_len
    if layer.ragged:
        new = layer.lengths[:, None] + torch.arange(q_len, device=device)
        new = new if positions is None else positions.to(device)
        valid = (new >= 0).sum(1)
        layer.lengths = layer.lengths + valid
        count = valid[:, None, None]
    else:
        new = torch.arange(layer.seen - q_len, layer.seen, device=device)[None]
    kept = total - q_len
    stored = new.to(torch.int32)[:, None].expand(batch, heads, q_len)
    if kept:
        stored = torch.cat([layer.positions[:, :, :kept], stored], 2)
    state = {
        name: functional.pad(number[:, :, :kept], (0, q_len))
        for name, number in layer.state.items()
    }
    view = SlotView(
        values=(values_by_kv_head(layer, value),),
        positions=stored,
        tokens_seen=layer.count,
        budget=layer.budget,
        held=held_slots(layer, stored),
        layer=layer.index,
        heads=layer.heads,
        block=count,
        kept_in_parent=kept_above(layer, stored),
        first_layer_budget=widest(layer),
    )
    return Block(new, view, state, kept)


def widest(layer: SlotLayer) -> Count:
    """What the first layer of a nest may keep."""
    return layer.nest[0].budget if layer.nest else layer.budget


def kept_above(layer: SlotLayer, positions: Tensor) -> Tensor | None:
    """Which of these slots hold tokens that the layer above keeps: bool (batch, 1, slots)."""
    if not layer.nest:
        return None
    kept = layer.nest[-1].stored_positions()[:, 0].long().to(positions.device)
    count = layer.seen + 1  # an empty slot, -1, counts as the last one
    known = torch.zeros(kept.shape[0], count, dtype=torch.bool, device=positions.device)
    known.scatter_(1, kept.remainder(count), True)[:, -1] = False
    return known.gather(1, positions[:, 0].long().remainder(count))[:, None]


def block_needs_all_rows(layer: SlotLayer) -> bool:
    """Whether the policy, or what splits the budget, wants the weights of every query."""
    return layer.held_back or layer.policy.needs_all_rows


def block_needs_last_rows(layer: SlotLayer, block: Block) -> bool:
    """Whether the policy wants the last queries' weights: only if something has to go."""
    if layer.policy.ranking.evidence is not Evidence.LAST_ROWS:
        return False
    return layer.held_back or _over_budget(layer, block)


def weigh_votes(layer: SlotLayer, block: Block, rows: int) -> Tensor | None:
    """What the last queries' rows weigh, (batch or 1, rows); None: they come one by one."""
    weights = layer.policy.ranking.vote_weights(rows, block.view.first_layer_budget)
    return None if weights is None else weights.to(block.new.device)


def last_queries(layer: SlotLayer, new: Tensor) -> Tensor:
    """Index of the last queries of each row that a policy sees: (batch or 1, rows).

    Args:
        new: (batch or 1, q_len) positions of all queries, -1 = padding.
    """
    first = layer.nest[0] if layer.nest else layer
    count = min(layer.policy.ranking.voters(first.most), new.shape[1])
    place = torch.arange(new.shape[1], device=new.device)[None]
    if layer.ragged:
        place = torch.where(new >= 0, place, -1).argsort(-1)
    return place[:, -count:]


class WatchedBlock:
    """Hands the rows of a block, as they come, to whoever wants all of them."""

    def __init__(self, layer: SlotLayer, block: Block) -> None:
        self._layer, self._block = layer, block
        self._scored = layer.policy.needs_all_rows
        self._sums: Tensor | None = None

    def see(self, rows: AttentionRows) -> None:
        """Take some of the block's rows."""
        view = self._block.view
        if self._scored:
            self._layer.policy.observe(self._block.state, view, rows)
        if self._layer.held_back:
            if self._sums is None:
                slots = view.positions.shape[2]
                self._sums = rows.weights.new_zeros((*rows.weights.shape[:3], slots))
            self._sums[..., : rows.slots] += rows.weights.sum(3)

    def end(self) -> None:
        """Say that all rows have come."""
        if self._sums is not None:
            self._layer.density.add(self._sums, self._block.view.block)


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
    view = block.view
    if layer.held_back:
        importance, _ = judge(layer, view, block.state, rows, 0)
        layer.waiting = importance, view.block
        store_block(layer, block, raw_key, raw_value)
        return None
    layer.marked = None
    if not _over_budget(layer, block):
        store_block(layer, block, raw_key, raw_value)
        if layer.head_budgets is not None:
            layer.split_by_head()
        return None
    victims = at_least_zero(view.held - layer.budget)
    importance, protected = judge(layer, view, block.state, rows, victims)
    if layer.policy.select_only:
        slots = min(layer.most, view.positions.shape[2])
        layer.marked = keep_top(importance, view.positions, layer.budget, protected, slots)[1]
        store_block(layer, block, raw_key, raw_value)
        return None
    return _cut(layer, view, block.state, raw_key, raw_value, importance, protected)


def store_block(layer: SlotLayer, block: Block, raw_key: Tensor, raw_value: Tensor) -> None:
    """Store the block behind the kept slots, cutting nothing."""
    new = slice(block.kept, None)
    layer.extend(raw_key[:, :, new], raw_value[:, :, new], block.view.positions, block.state)


def cut_stored(layer: SlotLayer) -> None:
    """Cut what was held back to the budget that the layer has got meanwhile."""
    (importance, block), layer.waiting = layer.waiting, None
    if layer.used <= layer.least and layer.head_budgets is None:
        return
    view = replace(_used_view(layer, layer.values), block=block)
    state = used_state(layer)
    victims = at_least_zero(view.held - layer.budget)
    protected = layer.policy.ranking.protected(state, view, victims)
    keys, values = layer.keys[:, :, : layer.used], layer.values[:, :, : layer.used]
    _cut(layer, view, state, keys, values, importance, protected)
    layer.shrink(layer.used + (not layer.appends))


def _cut(
    layer: SlotLayer,
    view: SlotView,
    state: State,
    keys: Tensor,
    values: Tensor,
    importance: Tensor,
    protected: Tensor | None,
) -> Tensor:
    """Store what stays of (batch, kv_heads, slots), and return its indices."""
    budget, slots = layer.budget, min(layer.most, view.positions.shape[2])
    layer.head_budgets = None
    split = layer.policy.head_split
    if split is not None and view.positions.shape[1] * layer.heads.processes > 1:
        heads = Heads(
            budget=budget,
            importance=layer.heads.all(importance, 0),
            positions=layer.heads.all(view.positions, -1),
            protected=None if protected is None else layer.heads.all(protected, False),
            least=layer.policy.score.when == "always",
            tokens_seen=view.tokens_seen,
            rank=None if layer.head_rank is None else layer.head_rank.to(layer.device),
            of=layer.heads_ranked,
        )
        layer.head_budgets = layer.heads.own(split.tokens(heads))
        budget = layer.head_budgets[..., None]
        slots = min(int(budget.max()), view.positions.shape[2])
    chosen, positions = keep_top(importance, view.positions, budget, protected, slots)
    kept = part_block(layer, (keys, values), view, state, importance, chosen, positions)
    close_ranks(kept[-1], view.positions, chosen)
    if layer.head_budgets is None:
        layer.replace(*kept)
        if layer.policy.two_stages:  # the whole prompt was stored
            layer.shrink(layer.used)
    else:
        split_lanes(layer, *kept)
    return chosen


def _over_budget(layer: SlotLayer, block: Block) -> bool:
    score = layer.policy.ranking
    if score.when == "never" or score.layers == "same":
        return False
    if layer.head_budgets is not None:
        return True  # heads that were cut are full, whatever the mean over all heads
    return block.view.positions.shape[2] > layer.least


# -------------------------------------------------------------------------------------------------
# attention of a block


def enter_decode(layer: SlotLayer, positions: Tensor | None) -> None:
    """Place the token that the layer has just taken in, and count it.

    Args:
        positions: (batch, 1), -1 where a row has padding instead; None: no padding.
    """
    layer.place(count_decoded(layer, positions))


def count_decoded(layer: SlotLayer, positions: Tensor | None) -> int | Tensor:
    """Count the token that the layer has just taken in, and return its position in each row."""
    if positions is not None and not layer.ragged:
        layer.lengths = torch.full_like(positions[:, 0], layer.seen - 1)
    layer.pairs_read = layer.used
    if not layer.ragged:
        return layer.seen - 1 if layer.clock is None else layer.clock.flatten() - 1
    new = layer.lengths if positions is None else positions[:, 0].to(layer.lengths.device)
    if layer.clock is None:
        layer.lengths = layer.lengths + (new >= 0)
        return new
    new = new.clone()
    layer.lengths.add_(new >= 0)
    return new


def decode_needs_rows(layer: SlotLayer) -> bool:
    """Whether the policy wants the weights of the token being decoded."""
    if layer.policy.needs_all_rows:
        return True
    score = layer.policy.ranking
    if not layer.cuts_itself or score.evidence is Evidence.NOTHING:
        return False
    return layer.used > layer.least


def decode_rows(layer: SlotLayer, weights: Tensor, positions: Tensor | None) -> AttentionRows:
    """The weights of a decoded token as evidence."""
    visible = (layer.positions[:, :, None, : layer.used] >= 0) if layer.masked else None
    valid = None if positions is None else positions >= 0
    return make_rows(layer, weights, visible, valid)


def leave_decode(
    layer: SlotLayer, value: Tensor, rows: AttentionRows | None, counted: bool = False
) -> None:
    """Add the new row to the statistics and choose the slot that the next token overwrites.

    Args:
        rows: the weights, if the policy wants them.
        counted: whether the row is in the statistics already.
    """
    layer.written = None
    observed = layer.policy.needs_all_rows and not counted
    if layer.group is not None:
        layer.group.arrive(layer, values_by_kv_head(layer, value), rows, observed)
        return
    score = layer.policy.ranking
    full = layer.cuts_itself and layer.used > layer.least
    if not (observed or full):
        return
    view, state = _used_view(layer, value), used_state(layer)
    if observed:
        layer.policy.observe(state, view, rows)
    if not full:
        return
    if layer.ragged and layer.used <= layer.most:
        more = layer.most + 1 - layer.used
        layer.fill_to(layer.most + 1)
        value = functional.pad(value, (0, 0, 0, more))
        if rows is not None:
            rows = replace(rows, weights=functional.pad(rows.weights, (0, more)))
        view, state = _used_view(layer, value), used_state(layer)
    importance, protected = judge(layer, view, state, rows, victims=1)
    if layer.ragged:
        # a row below its budget takes an empty slot, a row above it gives up its worst one
        empty = view.positions < 0
        over = view.held > layer.budget
        importance = importance.masked_fill(empty & ~over, float("-inf"))
        unused = empty & over
        protected = unused if protected is None else (protected & over) | unused
    distinct = score.distinct and layer.policy.rescore is None
    layer.give_up(lowest(importance, view.positions, protected, distinct))
    close_rank(state, view.positions, layer.pending)
    part_decoded(layer, view.tokens_seen)


def used_state(layer: SlotLayer) -> State:
    """The policy's numbers for the slots in use."""
    return {name: number[:, :, : layer.used] for name, number in layer.state.items()}


def _used_view(layer: SlotLayer, value: Tensor) -> SlotView:
    positions = layer.positions[:, :, : layer.used]
    return SlotView(
        values=(values_by_kv_head(layer, value),),
        positions=positions,
        tokens_seen=layer.count,
        budget=layer.budget,
        held=held_slots(layer, positions),
        layer=layer.index,
        heads=layer.heads,
    )


def make_rows(
    layer: SlotLayer, weights: Tensor, visible: Tensor | None, valid: Tensor | None
) -> AttentionRows:
    """Weights by the heads that are cached; rows of padding count for nothing."""
    batch, _, _, q_len, keys = weights.shape
    weights = weights.reshape(batch, layer.positions.shape[1], -1, q_len, keys)
    if valid is not None:
        weights = weights * valid[:, None, None, :, None]
    return AttentionRows(weights, visible, valid)


def judge(
    layer: SlotLayer, view: SlotView, state: State, rows: AttentionRows | None, victims: Count
) -> tuple[Tensor, Tensor | None]:
    score = layer.policy.ranking
    importance = score.importance(state, view, rows)
    if layer.policy.rescore is not None:
        importance = layer.policy.rescore.rescore(importance, view)
    return importance.expand_as(view.positions), score.protected(state, view, victims)


def held_slots(layer: SlotLayer, positions: Tensor) -> Count:
    """Stored slots of each row, or of each head where heads hold different counts."""
    if layer.head_budgets is not None:
        return (positions >= 0).sum(-1, keepdim=True)
    if not layer.ragged:
        return positions.shape[2]
    return (positions[:, :1] >= 0).sum(-1, keepdim=True)


def values_by_kv_head(layer: SlotLayer, value: Tensor) -> Tensor:
    """Values by the heads that are cached: latent attention caches one for all heads."""
    kv_heads = layer.positions.shape[1]
    if value.shape[1] == kv_heads or layer.policy.rescore is None:
        return value
    batch, heads, slots, dim = value.shape
    grouped = value.view(batch, kv_heads, heads // kv_heads, slots, dim)
    return grouped.transpose(2, 3).reshape(batch, kv_heads, slots, -1)
