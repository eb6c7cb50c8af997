"""A prompt that is stored whole until all layers have seen it, and how densely it attends (D2O)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtool.cache.features.held_queries import HeldQueries
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import CutsLater, LayerSite
from kvtool.cache.steps.block import cut, note_scores
from kvtool.cache.steps.view import used_view
from kvtool.maths.columns import column_variance
from kvtool.policies.numbers import Count, KVHeads, at_least_zero


@dataclass(frozen=True)
class DeferredScores:
    """The scores of what waits to be cut.

    Attributes:
        importance: (batch, kv_heads, slots) float32.
        block: tokens of each batch entry in the last block.
    """

    importance: Tensor
    block: Count


class Deferred(CutsLater):
    """Column sums of a prompt's attention, and its scores, until all layers have been seen.

    Attributes:
        queries: tokens of each batch entry that have been summed.
        scores: of the last block.
    """

    name = "deferred"

    def __init__(self) -> None:
        self.clear()

    @classmethod
    def make(cls, site: LayerSite) -> Deferred | None:
        allocator = site.policy.allocator
        return None if allocator is None or allocator.metric is None else cls()

    def clear(self) -> None:
        self.active = False
        self.sums = None
        self.queries: Count = 0
        self.scores: DeferredScores | None = None

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        self.sums = None if self.sums is None else change(self.sums)
        if isinstance(self.queries, Tensor):
            self.queries = change(self.queries)

    def start(self) -> None:
        """Defer cuts from here on."""
        self.active = True

    def add(self, sums: Tensor, queries: Count) -> None:
        if self.sums is not None:
            sums[..., : self.sums.shape[-1]] += self.sums
        self.sums, self.queries = sums, self.queries + queries

    def wait(self, importance: Tensor, block: Count) -> None:
        self.scores = DeferredScores(importance, block)

    def end(self) -> DeferredScores | None:
        """Return the scores, and forget everything: the cut is being made."""
        scores = self.scores
        self.clear()
        return scores

    def measure(self, positions: Tensor, heads: KVHeads) -> Tensor:
        """Measure the variance of the column sums, over the slots that hold a token.

        Args:
            positions: (batch, kv_heads, slots), -1 = empty.

        Returns:
            (batch, 3) float64: the variance, mean over query heads; the queries; the slots that
            hold a token, mean over KV heads.
        """
        if self.sums is None:
            raise RuntimeError("no block of this prompt has been attended")
        stored = positions >= 0
        variance = column_variance(self.sums, stored[:, :, None]).mean(2)
        held = stored.sum(-1).double()
        queries = torch.as_tensor(self.queries, device=held.device).expand(len(held), 1, 1)
        numbers = [heads.mean(variance), queries[:, 0, 0], heads.mean(held)]
        return torch.stack([number.double() for number in numbers], -1)


def cut_deferred(layer: SlotLayer) -> None:
    """Cut what was deferred to the budget that the layer has got meanwhile."""
    part = Deferred.of(layer)
    scores = None if part is None else part.end()
    layer.grow_exactly(False)
    split = layer.budget.by_head is not None
    if scores is None or (layer.slots.used <= layer.budget.min_budget and not split):
        held = HeldQueries.of(layer)
        if held is not None:
            held.clear()
        return
    used = layer.slots.used_slots()
    view = replace(used_view(layer), block=scores.block)
    evicted = at_least_zero(view.held - layer.budget.tokens)
    protected = layer.policy.ranking.protected(used.state, view, evicted)
    note_scores(layer, view, scores.importance, protected)
    cut(layer, view, used.state, None, scores.importance, protected)
    if layer.ragged is None:
        layer.slots.shrink(layer.slots.used + layer.policy.spare)
