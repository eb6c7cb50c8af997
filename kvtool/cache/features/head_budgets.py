"""Split the budget of a layer over its KV heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import CutsByHead, LayerSite
from kvtool.policies.allocate.head_split import HeadSplit
from kvtool.policies.allocate.problem import Heads
from kvtool.policies.parts import SlotView


class HeadBudgets(CutsByHead):
    """The split of a layer's budget over its KV heads.

    Attributes:
        split: how it is split.
        rank: (kv_heads,) integers, place of each head among the `ranked` of the model, 0 for the
            one that most needs the whole text; None where heads are not ranked.
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
    """Give every layer of free budget the ranks of its heads that most need the whole text.

    Args:
        ranks: (layers, kv_heads) integers, 0 for the head that most needs it.
    """
    free = [i for i, layer in enumerate(layers) if layer.window is None]
    among = ranks[free].flatten().argsort().argsort().view(len(free), -1)
    for i, own in zip(free, among, strict=True):
        part = HeadBudgets.of(layers[i])
        if part is not None:
            part.set_ranks(own, among.numel())
