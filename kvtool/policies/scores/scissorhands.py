"""Scissorhands, in RoCo's form: how often a token received at least average attention (AQAS).

Liu et al., 2023, https://arxiv.org/abs/2305.17118, algorithm 2; Ren and Zhu, 2024,
https://arxiv.org/abs/2402.06262, section 4.

Differences from the original: it counts over the last 400 rows only and drops several tokens at a
time. The form that later papers compare with counts every row and drops what is over the budget. A
weight is average at 1 / (visible keys), and a weight equal to it counts (within 1e-6 of it: see
`kvtool.maths.columns`).
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
class Scissorhands(Score):
    """Keep the tokens that most often got at least average attention, and a recent window.

    Args:
        recent: newest tokens that are always kept; None: half of the budget.
        positions: `cache` numbers tokens by their place in the cache, for texts without end.
    """

    recent: int | None = computed("budget/2")
    positions: Positions = "text"

    name: ClassVar = "scissorhands"
    paper: ClassVar = "https://arxiv.org/abs/2305.17118"
    evidence: ClassVar = Evidence.COLUMNS
    statistics: ClassVar = ("above_average",)
    attention: ClassVar = True

    def __post_init__(self) -> None:
        if self.recent is not None and self.recent < 0:
            raise UsageError(f"scissorhands: recent must be 0 or more, got {self.recent}")

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        return state["above_average"]

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor:
        return view.recent(half(view.budget) if self.recent is None else self.recent)

    def reserved(self, budget: int) -> Mapping[str, int]:
        return {"recent": half(budget) if self.recent is None else self.recent}
