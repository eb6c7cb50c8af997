"""H2O: heavy hitters by accumulated attention, beside a recent window (also called AAS).

Zhang et al., 2023, https://arxiv.org/abs/2306.14048, section 4.2.

Differences from the authors' code: the sums are per KV head, of the mean over its query heads (they
have one query head per KV head), and per batch entry. The recent window is half of the budget, as
in their experiments; `recent=0` gives the window-less form that CAOTE seems to compare with. Where
heads have budgets of their own (`+ada`), half of the layer's mean is the window in every head when
the budget is split. From then on, at every token, it is half of the head's own budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.policies.scores.shared import Summing


@dataclass(frozen=True)
class H2O(Summing):
    """Keep the tokens with the most accumulated attention, and a recent window."""

    name: ClassVar = "h2o"
    paper: ClassVar = "https://arxiv.org/abs/2306.14048"
    statistics: ClassVar = ("attention_sum",)
