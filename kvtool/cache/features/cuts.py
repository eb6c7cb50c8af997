"""Cuts that split a budget over KV heads, or wait until all layers have seen the prompt (D2O)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvtool.cache.features.held_queries import HeldQueries
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import CutsByHead, CutsLater, LayerSite
from kvtool.cache.steps.block import cut, note_scores
from kvtool.cache.steps.view import used_view
from kvtool.maths.columns import column_variance
from kvtool.policies.allocate.head_split import HeadSplit
from kvtool.policies.allocate.problem import Heads
from kvtool.policies.numbers import Count, at_least_zero
from kvtool.policies.parts import SlotView


class HeadBudgets(CutsByHead):
    """The split of a layer's budget over its KV heads.

    Attributes:
        split: how it is split.
        rank: (kv_heads,) integers, place of each head among the `ranked` of the model, 0 for the
            one that most needs the whole text; None: heads are not ranked.
        counts: (batch or 1, kv_heads) int64 on the host, the tokens of each head for the running
            prompt, where they are fixed.
    """

    name = "head_budgets"
    joins_padded = False
    refusals: Mapping[str, str] = {"shared": "keeps different counts in the heads of a layer"}

    def __init__(self, split: HeadSplit) -> None:
        self.split = split
        self.rank: Tensor | None = None
        self.ranked = 0
        self.counts: Tensor | None = None

    @classmethod
    def make(cls, site: LayerSite) -> HeadBudgets | None:
        split = site.policy.head_split
        return None if split is None else cls(split)

    @classmethod
    def expected(cls, layer: SlotLayer) -> HeadBudgets:
        """Return the part of a layer whose heads have budgets of their own."""
        part = cls.of(layer)
        assert part is not None, "heads that compete have one"
        return part

    def set_ranks(self, rank: Tensor, ranked: int) -> None:
        """Say which heads most need the whole text, among all of the model."""
        self.rank, self.ranked = rank, ranked

    def fix(self, counts: Sequence[Sequence[int]]) -> None:
        """Say what each head of every batch entry may keep, or of all entries alike."""
        self.counts = torch.tensor(counts)

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        self.counts = None  # of a prompt that has been cut; the next one says them anew

    def clear(self) -> None:
        self.counts = None

    def split_heads(
        self, layer: SlotLayer, view: SlotView, importance: Tensor | None, protected: Tensor | None
    ) -> Tensor | None:
        heads = layer.slots.heads
        if layer.slots.kv_heads * heads.processes == 1:
            return None
        if importance is None:
            if not self.split.fixed:
                return None
            assert self.counts is not None, "they are fixed as a prompt begins"
            counts = self.counts.to(layer.slots.device)
            return heads.own(counts.expand(layer.slots.batch, -1))
        return heads.own(self.split.tokens(self.heads_of(layer, view, importance, protected)))

    def heads_of(
        self, layer: SlotLayer, view: SlotView, importance: Tensor, protected: Tensor | None
    ) -> Heads:
        """Return what the split uses, of all heads in all processes."""
        heads = layer.slots.heads
        return Heads(
            budget=layer.budget.tokens,
            importance=heads.all(importance, 0),
            positions=heads.all(view.positions, -1),
            protected=None if protected is None else heads.all(protected, False),
            min_free=not layer.appends,
            tokens_seen=view.tokens_seen,
            rank=None if self.rank is None else self.rank.to(view.positions.device),
            of=self.ranked,
        )


def rank_heads(layers: Sequence[SlotLayer], ranks: Tensor) -> None:
    """Give layers of free budget the ranks of their heads, (layers, kv_heads): 0 needs most."""
    free = [i for i, layer in enumerate(layers) if layer.window is None]
    among = ranks[free].flatten().argsort().argsort().view(len(free), -1)
    for i, own in zip(free, among, strict=True):
        part = HeadBudgets.of(layers[i])
        if part is not None:
            part.set_ranks(own, among.numel())


class Deferred(CutsLater):
    """Column sums of a prompt's attention, and its scores, until all layers have been seen.

    Attributes:
        queries: tokens of each batch entry that have been summed.
        scores: (batch, kv_heads, slots) float32 of the last block, and its tokens by batch entry.
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
        self.scores: tuple[Tensor, Count] | None = None

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
        self.scores = importance, block


def measure(layer: SlotLayer) -> Tensor:
    """Measure the variance of the column sums of a layer that waits, over its filled slots.

    Returns:
        (batch, 3) float64: the variance, mean over query heads; the queries; the filled slots, mean
        over KV heads.
    """
    part, slots = Deferred.of(layer), layer.slots
    assert part is not None, "which waits"
    assert part.sums is not None, "a block has been attended"
    stored, heads = slots.positions[:, :, : slots.used] >= 0, slots.heads
    variance = column_variance(part.sums, stored[:, :, None]).mean(2)
    held = stored.sum(-1).double()
    queries = torch.as_tensor(part.queries, device=held.device).expand(len(held), 1, 1)
    numbers = [heads.mean(variance), queries[:, 0, 0], heads.mean(held)]
    return torch.stack([number.double() for number in numbers], -1)


def cut_deferred(layer: SlotLayer) -> None:
    """Cut what was deferred to the budget that the layer has got meanwhile."""
    part = Deferred.of(layer)
    assert part is not None, "which was deferred"
    scores = part.scores
    part.clear()
    layer.grow_exactly(False)
    split = layer.budget.by_head is not None
    if scores is None or (layer.slots.used <= layer.budget.min_budget and not split):
        held = HeldQueries.of(layer)
        if held is not None:
            held.clear()
        return
    used = layer.slots.used_slots()
    importance, block = scores
    view = replace(used_view(layer), block=block)
    evicted = at_least_zero(view.held - layer.budget.tokens)
    protected = layer.policy.ranking.protected(used.state, view, evicted)
    note_scores(layer, view, importance, protected)
    cut(layer, view, used.state, None, importance, protected)
    if layer.ragged is None:
        layer.slots.shrink(layer.slots.used + layer.policy.spare)
