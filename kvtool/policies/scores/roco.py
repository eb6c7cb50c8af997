"""RoCo: mean attention (MAS), leaving out the tokens whose attention varies most.

Ren and Zhu, 2024, https://arxiv.org/abs/2402.06262, section 5 and appendix A.

Differences from the paper: a fresh token has one observation, so its deviation is 0 and the literal
rule evicts the newest token. The authors' code protects the last 10 tokens and 4 sinks, which is
the default here (`protect_recent=0, sinks=0` is literal). As in that code a token's own row counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvtool.lazy_torch import Tensor
from kvtool.maths.selection import top_mask
from kvtool.policies.numbers import AnyCount, at_least_zero, half, minimum
from kvtool.policies.parts import AttentionRows, Count, Evidence, Positions, Score, SlotView, State
from kvtool.policies.spelling import computed, limited


def mean_attention(attention_sum: Tensor, count: Tensor) -> Tensor:
    """Average the weights that each slot received; 0 where nothing was seen."""
    return attention_sum / count.clamp(min=1)


def attention_deviation(attention_sum: Tensor, square_sum: Tensor, count: Tensor) -> Tensor:
    """Compute the population deviation of the weights of each slot; 0 after one observation."""
    count = count.clamp(min=1)
    mean = attention_sum / count
    return (square_sum / count - mean * mean).clamp_(min=0).sqrt_()


@dataclass(frozen=True)
class RoCo(Score):
    """Keep the tokens with the highest mean attention, and those whose attention varies most.

    Args:
        scope: tokens of highest deviation that are not evicted; None: half of the budget.
        protect_recent: newest tokens that are always kept; None: 10, at most a quarter of the
            budget.
        sinks: first tokens that are always kept.
    """

    scope: int | None = computed("budget/2", "0 or more")
    protect_recent: int | None = computed("min(10, budget/4)", "0 or more")
    sinks: int = limited(4, "0 or more")
    positions: Positions = "text"

    name: ClassVar = "roco"
    paper: ClassVar = "https://arxiv.org/abs/2402.06262"
    evidence: ClassVar = Evidence.COLUMNS
    statistics: ClassVar = ("attention_sum", "square_sum", "count")
    attention: ClassVar = True

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        return mean_attention(state["attention_sum"], state["count"])

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor:
        recent = self._protect_recent(view.budget)
        forced = view.recent(recent) | view.sinks(self.sinks)
        # forced tokens never leave, so they are all held once there are enough of them
        free = at_least_zero(view.held - minimum(recent + self.sinks, view.held) - evicted)
        deviation = attention_deviation(*(state[name] for name in self.statistics))
        scope = minimum(half(view.budget) if self.scope is None else self.scope, free)
        return forced | top_mask(deviation, view.positions, scope, among=~forced)

    def reserved(self, budget: int) -> Mapping[str, int]:
        return {"sinks": self.sinks, "protect_recent": self._protect_recent(budget)}

    def _protect_recent(self, budget: AnyCount) -> AnyCount:
        return minimum(10, budget // 4) if self.protect_recent is None else self.protect_recent
