"""The same budget in every layer."""

from __future__ import annotations

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
