"""Scissorhands, in RoCo's form: how often a token received at least average attention (AQAS).

Liu et al., 2023, https://arxiv.org/abs/2305.17118, algorithm 2; Ren and Zhu, 2024,
https://arxiv.org/abs/2402.06262, section 4.

Differences from the original: it counts over the last 400 rows only and drops several tokens at a
time. The form that later papers compare with counts every row and drops what is over the budget. A
weight is average at 1 / (visible keys), and a weight equal to it counts (within 1e-6 of it: see
`kvtool.maths.columns`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.policies.scores.shared import Summing


@dataclass(frozen=True)
class Scissorhands(Summing):
    """Keep the tokens that most often got at least average attention, and a recent window."""

    name: ClassVar = "scissorhands"
    paper: ClassVar = "https://arxiv.org/abs/2305.17118"
    statistics: ClassVar = ("above_average",)
