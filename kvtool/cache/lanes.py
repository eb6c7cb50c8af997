"""KV heads that keep different counts, stored for real and not masked at the size of the fullest.

One head of one row is a lane. Lanes of nearly the same size share a slot layer of their own, whose
rows they are, so that a decoded token runs the same step as everywhere, store by store. A block of
a prompt sees all heads side by side again, while it runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtool.cache.slots import SlotLayer
from kvtool.policies.allocate.problem import UNLIMITED
from kvtool.policies.numbers import State

_TIGHT = 7 / 8  # a lane joins a store if it fills at least so much of it
_CLOSE = 8  # or if it is at most so many slots short


@dataclass
class Lanes:
    """The heads of a layer, by stores of lanes of nearly the same size.

    Attributes:
        stores: slot layers whose rows are lanes and which have one KV head.
        order: (lanes,) int64, the lanes in the order of the stores; lane = row * kv_heads + head.
        back: (lanes,) int64, where each lane is in that order.
        kv_heads: KV heads of a row.
    """

    stores: list[SlotLayer]
    order: Tensor
    back: Tensor
    kv_heads: int

    def pick(self, tensor: Tensor) -> Tensor:
        """Bring what belongs to heads, (batch, kv_heads, ..), into the order of the stores."""
        return tensor.flatten(0, 1).index_select(0, self.order)

    def put_back(self, tensor: Tensor) -> Tensor:
        """Bring (lanes, ..) in the order of the stores back to (batch, kv_heads, ..)."""
        return tensor.index_select(0, self.back).unflatten(0, (-1, self.kv_heads))

    def positions(self) -> Tensor:
        """Positions side by side, -1 = empty or about to be overwritten."""
        return self._beside([store.stored_positions() for store in self.stores], -1)

    def side_by_side(self) -> tuple[Tensor, Tensor, Tensor, State]:
        """Copies of what all lanes hold, in ascending position, empty slots last."""
        parts = [store.sorted_slots() for store in self.stores]
        keys, values, positions, states = zip(*parts, strict=True)
        state = {name: self._beside([part[name] for part in states], 0) for name in states[0]}
        return (
            self._beside(list(keys), 0),
            self._beside(list(values), 0),
            self._beside(list(positions), -1),
            state,
        )

    def _beside(self, parts: list[Tensor], fill: int) -> Tensor:
        """Join (lanes, 1, slots, ..) of all stores to (batch, kv_heads, most slots, ..)."""
        width = max(part.shape[2] for part in parts)
        first = parts[0]
        whole = first.new_full((len(self.order), width, *first.shape[3:]), fill)
        start = 0
        for part in parts:
            whole[start : start + len(part), : part.shape[2]] = part[:, 0]
            start += len(part)
        return self.put_back(whole)


def split_lanes(
    layer: SlotLayer, keys: Tensor, values: Tensor, positions: Tensor, state: State
) -> None:
    """Store the kept slots of a layer by lanes, in place of what it has stored.

    The layer's `head_budgets` say what each lane may keep. One device sync.

    Args:
        keys, values: (batch, kv_heads, slots, dim), in ascending position.
        positions: (batch, kv_heads, slots), -1 at the end where a head keeps fewer.
        state: the policy's numbers for them.
    """
    heads = positions.shape[1]
    budgets = layer.head_budgets.flatten().tolist()
    filled = (positions >= 0).sum(-1).flatten().tolist()
    needs = budgets if layer.policy.score.when == "always" else filled
    needs = [min(need, positions.shape[2]) for need in needs]
    # a store makes room for its largest budget, so what grows without end stands apart
    growing = [lane for lane, budget in enumerate(budgets) if budget >= UNLIMITED]
    limited = [lane for lane, budget in enumerate(budgets) if budget < UNLIMITED]
    stores, order = [], []
    tight = layer.tight
    for lanes in _bins(growing, needs, tight) + _bins(limited, needs, tight):
        index = torch.tensor(lanes, device=positions.device)
        rows, own = index // heads, index % heads
        width = max(filled[lane] for lane in lanes)
        store = SlotLayer(layer.index, layer.policy)
        picked = keys[rows, own, :width][:, None], values[rows, own, :width][:, None]
        store.lazy_initialization(*picked)
        store.rotation, store.reach = layer.rotation, layer.reach
        store.memory, store.calibration = {}, None  # the layer remembers for all its heads
        own_budgets = [budgets[lane] for lane in lanes]
        store.seen, store.least, store.most = layer.seen, min(own_budgets), max(own_budgets)
        store.budget = store.most
        if store.least < store.most:
            store.budget = torch.tensor(own_budgets, device=index.device)[:, None, None]
        if layer.ragged:
            store.lengths = layer.lengths[rows]
        elif len({(filled[lane], budgets[lane]) for lane in lanes}) > 1:
            store.lengths = torch.full((len(lanes),), layer.seen, device=index.device)
        store.replace(
            *picked,
            positions[rows, own, :width][:, None],
            {name: number[rows, own, :width][:, None] for name, number in state.items()},
        )
        stores.append(store)
        order += lanes
    order = torch.tensor(order, device=positions.device)
    layer.clear_slots()
    layer.lanes = Lanes(stores, order, order.argsort(), heads)


def _bins(lanes: Iterable[int], needs: list[int], tight: bool = False) -> list[list[int]]:
    """Put lanes together whose needs are close; the widest first, and lanes in ascending order.

    Args:
        tight: only those whose needs are equal.
    """
    bins: list[list[int]] = []
    for lane in sorted(lanes, key=lambda lane: -needs[lane]):
        widest = needs[bins[-1][0]] if bins else 0
        least = widest if tight else min(widest * _TIGHT, widest - _CLOSE)
        if bins and needs[lane] >= least:
            bins[-1].append(lane)
        else:
            bins.append([lane])
    return [sorted(lanes) for lanes in bins]
