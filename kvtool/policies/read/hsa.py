"""Hybrid sparse attention, RocketKV's second stage: pages and channels are cut at a time.

Behnam et al., 2025, https://arxiv.org/abs/2502.14051, section 3.4, algorithm 1. As in Quest, a page
of P tokens is known by its largest and smallest key. As in SparQ, only the k1 channels of largest
|q| are looked at, and of each only the bound that the sign of the group's query points to. The
k2 tokens of highest estimate are read, one by one: of the last page taken perhaps a part.

Where paper and code differ: algorithm 1 says only `score`. As in the code, the estimate is a
softmax over the tokens at SparQ's temperature, averaged over the query heads of a group. A channel
whose summed query is exactly 0 takes the upper bound (the paper; the code takes the lower).

The sizes follow from a budget of t pairs by RocketKV's plan, see `kvtool.planning.rocketkv_stages`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from kvtool.kernels.tables import row_product
from kvtool.lazy_torch import Tensor, torch
from kvtool.maths.estimates import heaviest_channels, pages_of, partial_scale, take_channels
from kvtool.maths.selection import top_slots
from kvtool.policies.numbers import HeadSizes
from kvtool.policies.read.paged import Paged, pages_of_rows
from kvtool.policies.read.rows import PerRow, RowsChoice, RowsView, fill_beyond
from kvtool.policies.read.view import Choice, ReadView, StepBudget, fixed
from kvtool.policies.spelling import computed, limited

LEAST_BUDGET = 16
"""As in the authors' code, pairs of key and value."""
_FAR = 2**62  # a place behind all others


@dataclass(frozen=True)
class HSA(Paged):
    """Read the tokens whose pages, in the largest channels of the query, promise most attention.

    Args:
        page: tokens of a page; None: by RocketKV's plan, as the next two.
        k1: channels to estimate with.
        k: tokens to attend to; by the plan half the budget.
        skip_layers: number of first layers that read all that they store.
    """

    page: int | None = computed("by RocketKV's plan", "1 or more")
    k1: int | None = computed("by RocketKV's plan", "1 or more")
    k: int | None = computed("budget/2", "1 or more")
    skip_layers: int = limited(0, "0 or more")

    name: ClassVar = "hsa"
    paper: ClassVar = "https://arxiv.org/abs/2502.14051"
    planned: ClassVar = True

    @property
    def min_budget(self) -> int:
        return LEAST_BUDGET

    def sized(self, step: StepBudget) -> HSA:
        plan = step.stages
        if plan is None:
            raise ValueError("hsa goes by the second stage of RocketKV's plan")
        return replace(
            self,
            page=self.page or plan.page_size,
            k1=min(self.k1 or plan.head_dims, step.head_dim),
            k=self.k or plan.top_k,
        )

    def counted_step(self, layer: HeadSizes, tokens: int) -> int:
        estimate = fixed(self.k1) * pages_of(tokens, self.page_size)
        read = min(fixed(self.k), tokens) * (layer.key_dim + layer.value_dim)
        return layer.kv_heads * (estimate + read) * layer.itemsize

    def choose(self, view: ReadView) -> Choice:
        tokens, page, channels = view.tokens, fixed(self.page), fixed(self.k1)
        pages = pages_of(tokens, page)
        used = heaviest_channels(view.query, channels)
        part = take_channels(view.query, used)
        negative = view.query.float().sum(2).gather(2, used) < 0
        rows = used + negative * view.query.shape[-1]
        logits = row_product(part, view.tables["bounds"], rows, pages)
        logits *= partial_scale(view.query, part, view.scale)
        share = logits.softmax(-1)  # as if all pages were whole
        if missing := pages * page - tokens:
            share = share / (1 - share[..., -1:] * (missing / page))
        slots = self._best_tokens(share.mean(2), tokens)
        return Choice(slots, estimate=channels * pages)

    def choose_rows(self, view: RowsView) -> RowsChoice:
        k1, sizes = view.sizes["k1"], view.sizes
        plan = view.counts.once("plan", lambda: _plan(view.counts, sizes["page"], sizes["k"]))
        used = heaviest_channels(view.query, k1.most)
        part = fill_beyond(take_channels(view.query, used), k1, 0)
        negative = view.query.float().sum(2).gather(2, used) < 0
        rows = torch.add(used, negative, alpha=view.query.shape[-1])
        logits = row_product(part, view.tables["bounds"], rows, plan.pages.most)
        logits *= partial_scale(view.query, part, view.scale)
        logits = fill_beyond(logits, plan.pages, -torch.inf)
        share = logits.softmax(-1)  # as if all pages were whole
        final_share = share.gather(3, plan.final[..., None].expand(*share.shape[:3], 1))
        share = share / (1 - final_share * plan.missing)
        slots = _best_of_rows(share.mean(2), plan, sizes["page"])
        known = zip(k1.known, plan.pages.known, strict=True)
        return RowsChoice(slots, plan.k, [channels * count for channels, count in known])

    def _best_tokens(self, scores: Tensor, tokens: int) -> Tensor:
        """Take the first `k` tokens of the pages in the order of their scores."""
        k, pages, page = min(fixed(self.k), tokens), scores.shape[-1], fixed(self.page)
        partial = tokens < pages * page
        ranked = top_slots(scores, min(pages, pages_of(k, page) + partial))
        within = torch.arange(min(page, tokens), device=scores.device)
        slots = (ranked[..., None] * page + within).flatten(2)
        if partial:  # places behind the last token go behind all others
            slots = slots.gather(2, (slots >= tokens).sort(dim=-1, stable=True).indices)
        return slots[..., :k]


class _Plan(NamedTuple):
    """What a step needs to know of the pages, whatever their scores.

    Attributes:
        pages: of each sequence.
        k: tokens that are read.
        needed: pages that these come from, at most.
        final: (batch, 1, 1) int64, number of the last page.
        missing: (batch, 1, 1, 1) float32, the part of it that no token fills.
        ends: (batch, 1, ranks) where the tokens would end that are read up to the last page, were
            it the one of this rank.
        place: (places,) int64, from 0.
        places: the rank of the page that each token is read from, and its place in that, each
            (batch, 1, places); first where no page before it lacks tokens, then where one does.
    """

    pages: PerRow
    k: PerRow
    needed: int
    final: Tensor
    missing: Tensor
    ends: Tensor
    place: Tensor
    places: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def _plan(tokens: PerRow, page: PerRow, most: PerRow) -> _Plan:
    pages, k, size = pages_of_rows(tokens, page), tokens.least(most), page.tensor
    counts = zip(k.known, page.known, pages.known, strict=True)
    needed = max(min(every, pages_of(own, width) + 1) for own, width, every in counts)
    final = pages.tensor - 1
    last = tokens.tensor - final * size
    place, gap = torch.arange(k.most, device=size.device), size - last
    ends = torch.arange(needed, device=size.device) * size + last
    whole, behind = ((at // size, at % size) for at in (place, place + gap))
    ranks = [rank.clamp(max=needed - 1) for rank in (whole[0], behind[0])]
    places = (ranks[0], whole[1]), (ranks[1], behind[1])
    return _Plan(pages, k, needed, final, (gap / size)[..., None], ends, place, places)


def _best_of_rows(scores: Tensor, plan: _Plan, page: PerRow) -> Tensor:
    """Take each sequence's first `k` tokens of its pages in the order of their scores.

    Args:
        scores: (batch, kv_heads, pages) float32.

    Returns:
        (batch, kv_heads, the largest k) int64, -1 behind those of a sequence.
    """
    ranked = top_slots(scores, plan.needed)
    end = torch.where(ranked == plan.final, plan.ends, _FAR).amin(-1, keepdim=True)
    (rank, within), (later_rank, later) = plan.places
    behind = plan.place >= end
    best = ranked.gather(2, torch.where(behind, later_rank, rank))
    slots = torch.addcmul(torch.where(behind, later, within), best, page.tensor)
    return fill_beyond(slots, plan.k)
