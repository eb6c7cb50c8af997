"""What each KV head of a layer may keep, where heads differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import LayerSite, Part
from kvtool.policies.allocate.head_split import HeadSplit


class HeadBudgets(Part):
    """The split of a layer's budget over its KV heads.

    Attributes:
        split: how it is split.
        exact: whether heads of different counts take no slot more than they hold, each count in
            buffers of its own: bytes have been promised.
        tokens: (batch, kv_heads) int64, what each head may keep; None before the first cut.
        rank: (kv_heads,) integers, place of each head among the `ranked` of the model, 0 for the
            one that most needs the whole text; None where nobody has ranked them.
    """

    name = "head_budgets"
    joins_padded = False

    def __init__(self, split: HeadSplit, *, exact: bool) -> None:
        self.split, self.exact = split, exact
        self.tokens: Tensor | None = None
        self.rank: Tensor | None = None
        self.ranked = 0

    @classmethod
    def make(cls, site: LayerSite) -> HeadBudgets | None:
        split = site.policy.head_split
        return None if split is None else cls(split, exact=site.exact)

    def set_ranks(self, rank: Tensor, ranked: int) -> None:
        """Say which heads most need the whole text, among so many of the model."""
        self.rank, self.ranked = rank, ranked

    def assign(self, tokens: Tensor | None) -> None:
        """Say what each head may keep."""
        self.tokens = tokens

    def raise_by(self, new: list[int]) -> None:
        """Let every head of a batch entry keep so many tokens more."""
        if self.tokens is not None:
            more = torch.tensor(new, device=self.tokens.device)
            self.tokens = self.tokens + more[:, None]

    def clear(self) -> None:
        self.tokens = None

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        self.tokens = None if self.tokens is None else change(self.tokens)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.tokens is None else {self.name: self.tokens}

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.tokens = tensors.get(self.name)


def rank_heads(layers: Sequence[SlotLayer], ranks: Tensor) -> None:
    """Tell every layer of free budget which of its heads most need the whole text.

    Args:
        ranks: (layers, kv_heads) integers, 0 for the head that most needs it.
    """
    free = [i for i, layer in enumerate(layers) if layer.window is None]
    among = ranks[free].flatten().argsort().argsort().view(len(free), -1)
    for i, own in zip(free, among, strict=True):
        part = HeadBudgets.of(layers[i])
        if part is not None:
            part.set_ranks(own, among.numel())
