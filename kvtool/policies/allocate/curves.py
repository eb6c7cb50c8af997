"""Budgets by published curves: the share of the prompt that each layer keeps, by ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from kvtool.maths.allocation import Allocation
from kvtool.policies.allocate.problem import AllocationProblem
from kvtool.policies.parts import Allocator


@dataclass(frozen=True)
class Curves(Allocator):
    """The shares of published budget curves, which a plan reads from a file."""

    name: ClassVar = "curves"
    paper: ClassVar = "-"
    metric: ClassVar = "curves"

    def split(self, problem: AllocationProblem) -> Allocation:
        return problem.by_weight([math.log(max(share, 1e-9)) for share in problem.shares])
