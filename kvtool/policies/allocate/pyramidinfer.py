"""PyramidInfer's schedule: each layer keeps a share of what the layer above it keeps.

Yang et al., 2024, https://arxiv.org/abs/2405.12532. The newest int(0.2 n) + 1 tokens of a prompt
stay in every layer. Of the others, its context, layer l + 1 has int(p_l context_l) with p_l = (1 -
d)(cos(pi l / layers) + 1) / 2 + d, and not fewer than 64.

The authors fix d = 0.9 and store what comes of it. Here the budget is given, as the mean over the
layers, and d is what spends it. As the first layer keeps the whole prompt and p_0 is 1, even d = 0
needs about half of the prompt. Below, the schedule at d = 0 is that of a prompt short enough, whose
length is what the first layer keeps. One more difference: where the rule would leave fewer than 64,
the authors leave the context as it was, and here it falls to 64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from kvtool.maths.allocation import Allocation
from kvtool.policies.allocate.problem import AllocationProblem
from kvtool.policies.parts import Allocator

_HALVINGS = 60  # of the decay's bracket


def kept_tokens(
    n: int, layers: int, decay: float, *, recent_ratio: float = 0.2, min_context: int = 64
) -> list[int]:
    """Count what each layer keeps of a prompt of `n` tokens; never more than the layer above.

    >>> kept_tokens(1000, 8, 0.9)
    [1000, 1000, 996, 984, 959, 921, 871, 813]

    Args:
        decay: d, 0 to 1; 1 keeps everything.
        recent_ratio: share of the prompt that is recent.
        min_context: tokens beside the recent ones that the schedule leaves in any case.
    """
    recent = int(recent_ratio * n) + 1
    context = n - recent
    kept = []
    for layer in range(layers):
        kept.append(context + recent)
        share = 1 - (1 - decay) * (1 - math.cos(math.pi * layer / layers)) / 2
        context = max(int(context * share), min(context, min_context))
    return kept


@dataclass(frozen=True)
class Cosine(Allocator):
    """A falling share of the prompt from layer to layer, of a given mean (PyramidInfer)."""

    recent_ratio: float
    min_context: int

    name: ClassVar = "pyramidinfer"
    paper: ClassVar = "https://arxiv.org/abs/2405.12532"

    def split(self, problem: AllocationProblem) -> Allocation:
        line = self._kept(problem, max(problem.max_budgets), 0.0)
        if sum(line) <= problem.total:
            line = self._by_decay(problem, max(problem.max_budgets))
        else:
            line = self._by_length(problem, max(problem.max_budgets))
        return problem.by_weight([math.log(tokens) for tokens in line])

    def _kept(self, problem: AllocationProblem, n: int, decay: float) -> list[int]:
        return kept_tokens(
            n, problem.layers, decay, recent_ratio=self.recent_ratio, min_context=self.min_context
        )

    def _by_decay(self, problem: AllocationProblem, n: int) -> list[int]:
        """Find the schedule of the largest decay that the total can pay for."""
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if sum(self._kept(problem, n, middle)) <= problem.total:
                low = middle
            else:
                high = middle
        return self._kept(problem, n, low)

    def _by_length(self, problem: AllocationProblem, n: int) -> list[int]:
        """Find the steepest schedule, of the longest prompt that the total can pay for."""
        low, high = 1, n
        while high - low > 1:
            middle = (low + high) // 2
            if sum(self._kept(problem, middle, 0.0)) <= problem.total:
                low = middle
            else:
                high = middle
        return self._kept(problem, low, 0.0)
