"""AdaKV: heads of a layer compete for its budget, so that heads of wide attention keep more.

Feng et al., 2024, https://arxiv.org/abs/2407.11550. The authors' code rounds every head on its own,
so that the sum drifts from the budget; here it is exact. A head keeps no more than it offers: the
others share what it leaves, in proportion to their counts. Protected tokens do not compete.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from kvtool.lazy_torch import Tensor, torch
from kvtool.maths.selection import order_key
from kvtool.policies.allocate.head_split import HeadSplit
from kvtool.policies.allocate.problem import Heads
from kvtool.policies.spelling import limited

_FORCED = 0x7FFFFFFF << 32  # above the key of every float, infinity included
_ABSENT = -(0x7FFFFFFF << 32)  # below the key of every float, minus infinity included
_FINEST = 10_000  # denominator of the floor at most: four decimals


def split_heads(
    scores: Tensor,
    total: int | Tensor,
    *,
    floor: float = 0.2,
    safeguard: Literal["mix", "force"] = "mix",
    normalise: bool = False,
    among: Tensor | None = None,
    min_tokens: int = 0,
) -> Tensor:
    """Count how many tokens each head of a layer keeps: `total` in every sequence.

    The best `total` entries of all heads together are counted head by head; equal scores go to the
    lower position, then to the lower head. No head is given more than it offers: what it leaves
    goes to the others in proportion to their counts. No device sync.

    Args:
        scores: (batch, kv_heads, n) float32 on one scale for all heads, higher = keep.
        total: tokens of all heads together, one number or (batch, 1); where the heads offer fewer,
            all that they offer.
        floor: part of the budget that every head has for sure, 0 to 1.
        safeguard: `mix` moves the counts towards the mean by this part; `force` lets every head
            keep the best `floor * mean` of its own before the heads compete for the rest.
        normalise: first weigh each head by how much of its score its own best `mean` hold.
        among: bool (batch, kv_heads, n), the entries that compete; None: all.
        min_tokens: what each head has for sure before the shares are mixed; at most the mean.

    Returns:
        (batch, kv_heads) int64.
    """
    batch, heads, n = scores.shape
    among = torch.ones_like(scores, dtype=torch.bool) if among is None else among
    offered = among.sum(-1)
    total = torch.minimum(torch.as_tensor(total, device=scores.device), offered.sum(1, True))
    mean = (total // heads)[..., None]
    rank = _rank(scores, among)
    if normalise:
        scores = scores * _coverage(scores, among, rank < mean)
    part, whole = _as_ratio(floor)
    sure = mean * (part if safeguard == "force" else 0) // whole
    first = rank < sure.clamp(min=min_tokens)
    competing = torch.where(among & first, _FORCED, _keys(scores, among))
    # position by position, so that heads of equal scores share alike
    order = competing.transpose(1, 2).reshape(batch, n * heads).argsort(-1, descending=True)
    taken = torch.arange(n * heads, device=scores.device) < total
    counts = torch.zeros(batch, heads, dtype=torch.int64, device=scores.device)
    counts = counts.scatter_add_(1, order % heads, taken.long())
    if safeguard == "force":
        return counts
    # the mixed counts times `heads * whole`: in whole numbers, equal remainders stay equal
    return _apportion(heads * (whole - part) * counts + part * total, total, offered)


def total_tokens(heads: Heads) -> Tensor:
    """Count the tokens that all heads of a layer may keep together: (batch, 1) int64."""
    budget = torch.as_tensor(heads.budget, device=heads.positions.device)
    batch, count = heads.positions.shape[:2]
    return budget.expand(batch, 1, 1)[..., 0] * count


def competing_tokens(
    heads: Heads,
    total: Tensor,
    *,
    floor: float,
    safeguard: Literal["mix", "force"],
    normalise: bool = False,
) -> Tensor:
    """Count the tokens of heads that compete for what protection leaves of a total.

    Args:
        total: (batch, 1) int64 tokens of all heads together.
        floor, safeguard, normalise: as for `split_heads`.

    Returns:
        (batch, kv_heads) int64; a sequence whose text fits gives every head an equal part of what
        is to spare.
    """
    among = heads.positions >= 0
    stored = among.sum(-1)
    forced = torch.zeros_like(stored)
    if heads.protected is not None:
        forced = (heads.protected & among).sum(-1)
        among = among & ~heads.protected
    counts = split_heads(
        heads.importance,
        (total - forced.sum(1, keepdim=True)).clamp(min=0),
        floor=floor,
        safeguard=safeguard,
        normalise=normalise,
        among=among,
        min_tokens=heads.min_free,
    )
    spare = total - stored.sum(1, keepdim=True)
    return torch.where(spare >= 0, stored + spare // among.shape[1], counts + forced)


def _as_ratio(part: float) -> tuple[int, int]:
    """Return a part as the ratio of whole numbers that was meant: 0.2 as 1 / 5."""
    return Fraction(str(part)).limit_denominator(_FINEST).as_integer_ratio()


def _keys(scores: Tensor, among: Tensor) -> Tensor:
    """Make sortable integers: by score, then by position, then by head."""
    heads, n = scores.shape[1:]
    places = torch.arange(n, device=scores.device) * heads
    places = places + torch.arange(heads, device=scores.device)[:, None]
    return torch.where(among, order_key(scores, places), _ABSENT)


def _rank(scores: Tensor, among: Tensor) -> Tensor:
    """Rank each entry among those of its head, 0 for the best."""
    order = _keys(scores, among).argsort(-1, descending=True)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def _coverage(scores: Tensor, among: Tensor, best: Tensor) -> Tensor:
    """Compute the part of a head's score that its best entries hold: (batch, kv_heads, 1)."""
    scores = scores.masked_fill(~among, 0.0)
    whole = scores.sum(-1, keepdim=True)
    part = scores.masked_fill(~best, 0.0).sum(-1, keepdim=True)
    return torch.where(whole > 0, part / whole, 1.0).nan_to_num(1.0)  # infinite scores: all of it


def _apportion(weights: Tensor, total: Tensor, most: Tensor) -> Tensor:
    """Round proportions to whole numbers, within limits, by their largest remainders.

    What a limit binds keeps that limit, and the others the ratios of their weights, as in
    `kvtool.maths.allocation.allocate`; here rows are tensors and every remainder is exact. Equal
    remainders go to the lower head.

    Args:
        weights: (batch, kv_heads) int64, at least 0.
        total: (batch, 1) int64, at most the sum of `most`.
        most: (batch, kv_heads) int64; what a weight of 0 has is no more than its proportion, 0.
    """
    bound = _bound(weights, total, most)
    left = total - most.masked_fill(~bound, 0).sum(-1, keepdim=True)
    over = weights.masked_fill(bound, 0).sum(-1, keepdim=True).clamp(min=1)
    common = torch.gcd(left, over)
    left, over = left // common, over // common
    counts = torch.where(bound, most, weights * left // over)
    remainder = (weights * left % over).masked_fill(bound, 0)
    order = remainder.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, places)
    return counts + (rank < total - counts.sum(-1, keepdim=True))


def _bound(weights: Tensor, total: Tensor, most: Tensor) -> Tensor:
    """Mark the proportions that their limits cut off: bool (batch, kv_heads).

    From the head whose limit is lowest for its weight on: one is bound if, with those before it at
    their limits, its proportion of what is left is above its own.
    """
    weights, most = weights.double(), most.double()
    order = (most / weights).nan_to_num(torch.inf, torch.inf).argsort(-1)
    weight, limit = weights.gather(-1, order), most.gather(-1, order)
    left = total - (limit.cumsum(-1) - limit)
    over = weights.sum(-1, keepdim=True) - (weight.cumsum(-1) - weight)
    bound = (limit * over < weight * left).long().cumprod(-1).bool()
    return torch.zeros_like(bound).scatter_(-1, order, bound)


@dataclass(frozen=True)
class AdaSettings:
    """The settings of the competition.

    Args:
        share: part of the budget that every head has for sure.
        safeguard: `mix` moves the heads' counts towards the mean by the share, `force` lets every
            head keep its own best tokens first.
        normalise: weigh each head by how much of its score its best tokens hold.
    """

    share: float = limited(0.2, "between 0 and 1")
    safeguard: Literal["mix", "force"] = "mix"
    normalise: bool = False

    paper: ClassVar = "https://arxiv.org/abs/2407.11550"


@dataclass(frozen=True)
class Ada(AdaSettings, HeadSplit):
    """Heads of a layer compete for its budget by their scores (AdaKV)."""

    name: ClassVar = "ada"
    by_score: ClassVar = True

    def tokens(self, heads: Heads) -> Tensor:
        floor, total = self.share, total_tokens(heads)
        return competing_tokens(
            heads, total, floor=floor, safeguard=self.safeguard, normalise=self.normalise
        )
