"""AdaKV: heads of a layer compete for its budget, so that heads of wide attention keep more.

Feng et al., 2024, https://arxiv.org/abs/2407.11550. The authors' code rounds every head on its own,
so that the sum drifts from the budget; here it is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvtool.errors import UsageError
from kvtool.maths.selection import order_key
from kvtool.policies.allocate.room import Heads, HeadSplit

_FORCED = 0x7FFFFFFF << 32  # above the key of every float, infinity included
_ABSENT = -(0x7FFFFFFF << 32)  # below the key of every float, minus infinity included
_WHOLE = 1e-9  # a share this close below a whole number is that number


def split_heads(
    scores: Tensor,
    base: int | Tensor,
    *,
    share: float = 0.2,
    safeguard: Literal["mix", "force"] = "mix",
    normalise: bool = False,
    among: Tensor | None = None,
    least: int = 0,
) -> Tensor:
    """Count how many tokens each head of a layer keeps: kv_heads * base in every row.

    The best kv_heads * base entries of all heads together are counted head by head; equal scores
    go to the lower position, then to the lower head. No device sync.

    Args:
        scores: (batch, kv_heads, n) float32 on one scale for all heads, higher = keep.
        base: mean tokens per head, one number or (batch, 1, 1). Where the heads together offer
            fewer than kv_heads * base, every head is given at least what it offers.
        share: part of the budget that every head has for sure, 0 to 1.
        safeguard: `mix` moves the counts towards the mean by this share; `force` lets every head
            keep the best `share * base` of its own before the heads compete for the rest.
        normalise: first weigh each head by how much of its score its own best `base` hold.
        among: bool (batch, kv_heads, n), the entries that compete; None: all.
        least: tokens that each head has for sure before the shares are mixed; at most `base`.

    Returns:
        (batch, kv_heads) int64.
    """
    batch, heads, n = scores.shape
    among = torch.ones_like(scores, dtype=torch.bool) if among is None else among
    if not isinstance(base, Tensor):
        base = torch.full((1, 1, 1), base, device=scores.device)
    base = base.expand(batch, 1, 1)
    rank = _rank(scores, among)
    if normalise:
        scores = scores * _coverage(scores, among, rank < base)
    sure = base.double() * (share if safeguard == "force" else 0.0)
    sure = (sure + _WHOLE).floor().clamp(min=least)
    competing = torch.where(among & (rank < sure), _FORCED, _keys(scores, among))
    # position by position, so that heads of equal scores share alike
    order = competing.transpose(1, 2).reshape(batch, n * heads).argsort(-1, descending=True)
    taken = torch.arange(n * heads, device=scores.device) < heads * base[:, 0]
    counts = torch.zeros(batch, heads, dtype=torch.int64, device=scores.device)
    counts = counts.scatter_add_(1, order % heads, taken.long())
    if safeguard == "force":
        return counts
    mixed = counts.double() * (1 - share) + base[:, 0].double() * share
    return _round(mixed, heads * base[:, 0])


def _keys(scores: Tensor, among: Tensor) -> Tensor:
    """Sortable integers: by score, then by position, then by head."""
    heads, n = scores.shape[1:]
    places = torch.arange(n, device=scores.device) * heads
    places = places + torch.arange(heads, device=scores.device)[:, None]
    return torch.where(among, order_key(scores, places), _ABSENT)


def _rank(scores: Tensor, among: Tensor) -> Tensor:
    """Place of each entry among those of its head, 0 for the best."""
    order = _keys(scores, among).argsort(-1, descending=True)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def _coverage(scores: Tensor, among: Tensor, best: Tensor) -> Tensor:
    """Share of a head's score that its best entries hold: (batch, kv_heads, 1)."""
    scores = scores.masked_fill(~among, 0.0)
    whole = scores.sum(-1, keepdim=True)
    part = scores.masked_fill(~best, 0.0).sum(-1, keepdim=True)
    return torch.where(whole > 0, part / whole, 1.0).nan_to_num(1.0)  # infinite scores: all of it


def _round(shares: Tensor, total: Tensor) -> Tensor:
    """Whole numbers of the same sum: the largest remainders are rounded up, ties to lower heads.

    Args:
        shares: (batch, kv_heads) float64, whose rows sum to a whole number.
        total: (batch, 1) that number.
    """
    down = (shares + _WHOLE).floor()
    order = (shares - down).argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(shares.shape[-1], device=shares.device).expand_as(order)
    )
    down = down.long()
    return down + (rank < total - down.sum(-1, keepdim=True))


@dataclass(frozen=True)
class Ada(HeadSplit):
    """Heads of a layer compete for its budget by their scores (AdaKV).

    Args:
        share: part of the budget that every head has for sure.
        safeguard: `mix` or `force`: see `split_heads`.
        normalise: weigh each head by how much of its score its best tokens hold.
    """

    share: float = 0.2
    safeguard: Literal["mix", "force"] = "mix"
    normalise: bool = False

    name: ClassVar = "ada"
    paper: ClassVar = "https://arxiv.org/abs/2407.11550"
    by_score: ClassVar = True

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UsageError(f"{self.name}: share must be between 0 and 1, got {self.share}")

    def tokens(self, heads: Heads) -> Tensor:
        among = heads.positions >= 0
        forced = torch.zeros_like(among[..., :1]).long()
        if heads.protected is not None:
            forced = (heads.protected & among).sum(-1, keepdim=True)
            among = among & ~heads.protected
        stored = (heads.positions >= 0).sum(-1)
        mean = torch.as_tensor(heads.budget, device=among.device).expand(len(among), 1, 1)
        # what protection leaves of the layer's budget, which every head has in equal numbers
        base = (mean - forced.amax(1, keepdim=True)).clamp(min=0)
        counts = split_heads(
            heads.importance,
            base,
            share=self.share,
            safeguard=self.safeguard,
            normalise=self.normalise,
            among=among,
            least=heads.least,
        )
        spare = mean[:, 0] - stored.double().mean(1, keepdim=True).ceil().long()
        return torch.where(spare >= 0, stored + spare, counts + forced[..., 0])
