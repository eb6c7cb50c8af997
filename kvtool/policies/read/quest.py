"""Quest: pages of keys are ranked by an upper bound of their attention, and the best are read.

Tang et al., 2024, https://arxiv.org/abs/2406.10774. The bound of a page is
sum_d max(q_d max_d, q_d min_d) over the channels, with the largest and smallest key of the page.

Where the sources differ: the last page, perhaps not whole, is always read and is one of at least
three pages (the authors' kernel; their evaluation ranks it). Pages are ranked for a group of query
heads by the sum of their bounds (the authors rank for every query head on repeated keys). The
budget pays for bounds, too. Of t pairs half are two bounds a page, so a page has ceil(2 S / t)
tokens where S are stored at the end of a turn. It keeps that size while an answer is decoded. Where
three pages exceed the other half, more than t is read.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from kvtool.kernels.tables import page_scores
from kvtool.lazy_torch import Tensor, torch
from kvtool.maths.estimates import pages_of
from kvtool.maths.selection import top_slots
from kvtool.policies.numbers import HeadSizes
from kvtool.policies.read.paged import Paged
from kvtool.policies.read.rows import PerRow, RowsChoice, RowsView, fill_beyond
from kvtool.policies.read.view import Choice, ReadView, StepBudget, fixed
from kvtool.policies.spelling import computed, limited

_LEAST_PAGES = 3


@dataclass(frozen=True)
class Quest(Paged):
    """Read the pages whose keys could receive most attention.

    Args:
        page: tokens of a page; None: ceil(2 S / budget) for a prompt of S tokens.
        k: tokens to attend to, in whole pages; None: half the budget.
        skip_layers: number of first layers that read all that they store.
    """

    page: int | None = computed("2*prompt/budget", "1 or more")
    k: int | None = computed("budget/2", "1 or more")
    skip_layers: int = limited(0, "0 or more")

    name: ClassVar = "quest"
    paper: ClassVar = "https://arxiv.org/abs/2406.10774"

    def sized(self, step: StepBudget) -> Quest:
        page = self.page or max(1, -(-2 * step.tokens // step.pairs))
        return replace(self, page=page, k=self.k or step.pairs // self.divisor)

    def counted_step(self, layer: HeadSizes, tokens: int) -> int:
        page, pair = self.page_size, layer.key_dim + layer.value_dim
        pages, estimate, read = pages_of(tokens, page), 0, tokens
        chosen = max(_LEAST_PAGES, fixed(self.k) // page)
        if chosen < pages:
            estimate = 2 * layer.key_dim * pages
            read = (chosen - 1) * page + tokens - (pages - 1) * page
        return layer.kv_heads * (estimate + read * pair) * layer.itemsize

    def choose(self, view: ReadView) -> Choice:
        page = self.page_size
        pages = pages_of(view.tokens, page)
        chosen = max(_LEAST_PAGES, fixed(self.k) // page)
        if chosen >= pages:
            return Choice(None)
        bounds = view.tables["bounds"]
        scores = page_scores(view.query, bounds, pages)
        best = top_slots(scores[..., :-1], chosen - 1)
        within = torch.arange(page, device=best.device)
        last = torch.arange((pages - 1) * page, view.tokens, device=best.device)
        slots = (best[..., None] * page + within).flatten(2)
        slots = torch.cat([slots, last.expand(*slots.shape[:2], -1)], 2)
        return Choice(slots, estimate=bounds.shape[2] * pages)

    def choose_rows(self, view: RowsView) -> RowsChoice:
        bounds, sizes = view.tables["bounds"], view.sizes
        plan = view.counts.once("plan", lambda: _plan(view.counts, sizes["page"], sizes["k"]))
        last, ranked = plan.last, plan.ranked
        scores = fill_beyond(page_scores(view.query, bounds, last.most + 1), last, -torch.inf)
        best = top_slots(scores, max(1, ranked.most))
        chosen = best.gather(2, plan.rank.expand(*best.shape[:2], -1))
        slots = torch.addcmul(plan.within, chosen, sizes["page"].tensor)
        slots = torch.where(plan.ends, plan.end, slots)
        whole = zip(ranked.known, last.known, strict=True)
        estimate = [bounds.shape[2] * (all_ + 1) * (some < all_) for some, all_ in whole]
        return RowsChoice(slots, plan.read, estimate)


class _Plan(NamedTuple):
    """What pages a step reads, whatever their scores.

    Attributes:
        last: number of each sequence's last page.
        ranked: pages before it that are read.
        read: tokens of all these.
        rank: (batch, 1, places) among the pages before the last, best first, of each token read.
        within: (batch, 1, places), its place in its page.
        ends: bool (batch, 1, places), whether it is in the last page or there is none.
        end: (batch, 1, places), its number then, -1 for none.
    """

    last: PerRow
    ranked: PerRow
    read: PerRow
    rank: Tensor
    within: Tensor
    ends: Tensor
    end: Tensor


def _plan(tokens: PerRow, page: PerRow, k: PerRow) -> _Plan:
    last = tokens.map(_last_page, _last_page, page)
    least = _LEAST_PAGES - 1
    wanted = k.map(
        lambda count, size: max(least, count // size - 1),
        lambda count, size: (count // size - 1).clamp(min=least),
        page,
    )
    ranked, start = last.least(wanted), last.map(operator.mul, operator.mul, page)
    read = tokens.map(_pages_read, _pages_read, start, ranked, page)
    place = torch.arange(read.most, device=tokens.tensor.device)
    rank, within = place // page.tensor, place % page.tensor
    end, ends = fill_beyond(start.tensor + within, read), rank >= ranked.tensor
    return _Plan(last, ranked, read, rank.clamp(max=max(0, ranked.most - 1)), within, ends, end)


def _last_page(tokens: Any, page: Any) -> Any:
    return (tokens - 1) // page


def _pages_read(tokens: Any, start: Any, ranked: Any, page: Any) -> Any:
    """Count the tokens of some whole pages and of the last, which starts behind `start` tokens."""
    return ranked * page + tokens - start
