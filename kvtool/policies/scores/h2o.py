"""H2O: heavy hitters by accumulated attention, beside a recent window (also called AAS).

Zhang et al., 2023, https://arxiv.org/abs/2306.14048, section 4.2.

Differences from the authors' code: the sums are per KV head, of the mean over its query heads (they
have one query head per KV head), and per batch entry. The recent window is half of the budget, as
in their experiments; `recent=0` gives the window-less form that CAOTE seems to compare with. Where
heads have budgets of their own (`+ada`), half of the layer's mean is the window in every head when
the budget is split. From then on, at every token, it is half of the head's own budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvtool.errors import UsageError
from kvtool.policies.evidence import AttentionRows
from kvtool.policies.numbers import Count, State, half
from kvtool.policies.parts import Evidence, Positions, Score, SlotView
from kvtool.policies.spelling import computed

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class H2O(Score):
    """Keep the tokens with the most accumulated attention, and a recent window.

    Args:
        recent: newest tokens that are always kept; None: half of the budget.
        positions: `cache` numbers tokens by their place in the cache, for texts without end.
    """

    recent: int | None = computed("budget/2")
    positions: Positions = "text"

    name: ClassVar = "h2o"
    paper: ClassVar = "https://arxiv.org/abs/2306.14048"
    evidence: ClassVar = Evidence.COLUMNS
    statistics: ClassVar = ("attention_sum",)
    attention: ClassVar = True

    def __post_init__(self) -> None:
        if self.recent is not None and self.recent < 0:
            raise UsageError(f"h2o: recent must be 0 or more, got {self.recent}")

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        return state["attention_sum"]

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor:
        return view.recent(view.budget // 2 if self.recent is None else self.recent)

    def reserved(self, budget: int) -> Mapping[str, int]:
        return {"recent": half(budget) if self.recent is None else self.recent}
