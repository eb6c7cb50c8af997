"""PyramidKV: budgets fall along a line from the first layer to the last.

Cai et al., 2024, https://arxiv.org/abs/2406.02069. The observation window comes in addition to the
line, and the mean over the layers, window included, is the budget. The authors' code rounds the
step of the line down and spends up to 5% more than the budget; here the line is real-valued and
rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from kvtool.maths.allocation import Allocation
from kvtool.policies.allocate.problem import AllocationProblem
from kvtool.policies.parts import Allocator
from kvtool.policies.spelling import computed, limited

_WINDOW = 8  # where the policy has none, as in the authors' scripts


def pyramid_line(
    layers: int, budget: float, tokens: int, *, window: int, beta: float
) -> list[float]:
    """Draw the line of past tokens over the layers, the window left out, of mean budget - window.

    >>> pyramid_line(4, 128, 4096, window=8, beta=20)
    [234.0, 158.0, 82.0, 6.0]

    Args:
        budget: mean tokens per layer, window included.
        tokens: length of the prompt; between budget and 2 * (budget - window) all layers get the
            same.
        beta: the last layer has (budget - window) / beta.
    """
    past = max(budget - window, 0.0)
    if tokens < 2 * past or layers == 1:
        return [past] * layers
    last = past / beta
    first = 2 * past - last
    if first > tokens - window:
        first = float(tokens - window)
        last = 2 * past - first
    return [first - layer * (first - last) / (layers - 1) for layer in range(layers)]


@dataclass(frozen=True)
class Pyramid(Allocator):
    """More tokens for lower layers, along a line (PyramidKV).

    Args:
        beta: how steep: the last layer has 1/beta of the mean beside the window.
        window: newest tokens that every layer has in addition; by default the policy's window, 8
            without one.
    """

    beta: float = limited(20.0, "1 or more")
    window: int | None = computed("the policy's, else 8", "0 or more")

    name: ClassVar = "pyramid"
    paper: ClassVar = "https://arxiv.org/abs/2406.02069"

    def split(self, problem: AllocationProblem) -> Allocation:
        mean = problem.total / problem.layers
        window = self._window(problem)
        line = pyramid_line(
            problem.layers, mean, max(problem.max_budgets), window=window, beta=self.beta
        )
        return problem.by_weight([math.log(max(past + window, 1e-9)) for past in line])

    def _window(self, problem: AllocationProblem) -> int:
        given = (self.window, problem.window, _WINDOW)
        return next(window for window in given if window is not None)
