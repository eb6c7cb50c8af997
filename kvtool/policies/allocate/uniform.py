"""Splits that ask nothing of the model: equal budgets, and the shares of published curves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from kvtool.maths.allocation import Allocation
from kvtool.policies.allocate.problem import AllocationProblem
from kvtool.policies.parts import Allocator


@dataclass(frozen=True)
class Uniform(Allocator):
    """The same tokens in every layer; a remainder goes to the lowest ones."""

    name: ClassVar = "uniform"
    paper: ClassVar = "-"

    def split(self, problem: AllocationProblem) -> Allocation:
        return problem.by_weight([0.0] * problem.layers)


@dataclass(frozen=True)
class Curves(Allocator):
    """The shares of published budget curves, which a plan reads from a file."""

    name: ClassVar = "curves"
    paper: ClassVar = "-"
    metric: ClassVar = "curves"

    def split(self, problem: AllocationProblem) -> Allocation:
        return problem.by_weight([math.log(max(share, 1e-9)) for share in problem.shares])
