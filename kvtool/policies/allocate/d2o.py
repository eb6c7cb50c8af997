"""D2O: layers whose attention is spread densely get more tokens.

Wan et al., 2024, https://arxiv.org/abs/2406.13035, equations 4 and 5. F of a layer is the variance
of the column sums of its attention over a prompt, low where attention is dense. A layer's share is
the softmax of -F over the layers. Every turn of a conversation is measured anew: its queries, over
what the layer still holds and the turn itself; no layer is given more than that.

The column sums of a prompt have mean 1, so a sink that takes a share p of every row makes F about
p^2 n. With a sink in every layer, exp(-F) is 0 in any float, and even a stable softmax gives one
layer all. Hence the default divides F by its largest possible value, n - 1 (of a later turn of q
queries over S tokens q^2 (S - 1) / S^2). The authors' code takes the min-max across the heads of a
layer instead, which measures how heads differ, and does not spend exactly the budget; it is not
offered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvtool.maths.allocation import Allocation
from kvtool.policies.allocate.problem import AllocationProblem
from kvtool.policies.parts import Allocator
from kvtool.policies.spelling import limited

_EPSILON = 1e-6  # of the min-max norm, as the authors' code has it


def normalise(variance: Sequence[float], largest: Sequence[float], norm: str) -> list[float]:
    """Bring the variances of the layers to a scale on which their exponentials compare.

    Args:
        variance: F of each layer, population variance of the column sums.
        largest: the largest F of each layer, n - 1 over a prompt of n tokens.
        norm: `length` divides by the largest, so that 1 is all attention on one token. `minmax`
            maps the layers to 0 .. 1; `raw` leaves them as equation 5 has them.
    """
    if norm == "length":
        pairs = zip(variance, largest, strict=True)
        return [value / most if most > 0 else 0.0 for value, most in pairs]
    if norm == "minmax":
        low, high = min(variance), max(variance)
        return [(value - low) / (high - low + _EPSILON) for value in variance]
    return list(variance)


@dataclass(frozen=True)
class Density(Allocator):
    """Split by exp(-F / temperature), F brought to a scale by `norm`.

    Args:
        norm: `length` divides F by its largest possible value, `minmax` maps the layers to 0 .. 1,
            `raw` leaves F as it is.
        temperature: divides the exponents; above 1 brings the layers closer together.
    """

    norm: Literal["length", "minmax", "raw"] = "length"
    temperature: float = limited(1.0, "above 0")

    paper: ClassVar = "https://arxiv.org/abs/2406.13035"
    metric: ClassVar = "f_variance"

    def split(self, problem: AllocationProblem) -> Allocation:
        exponents = normalise(problem.variance, problem.largest, self.norm)
        return problem.by_weight([-exponent / self.temperature for exponent in exponents])


@dataclass(frozen=True)
class D2O(Density):
    """More tokens for layers of dense attention, by a softmax over the layers (D2O).

    The paper's exponential decay, exp(-F), differs from this only by a factor that the total
    removes.
    """

    name: ClassVar = "d2o"


@dataclass(frozen=True)
class D2OExp(Density):
    """Exponential decay of the variance, scaled to the total: the same shares as `d2o`."""

    name: ClassVar = "d2o-exp"


@dataclass(frozen=True)
class D2OReciprocal(Allocator):
    """Tokens in proportion to 1 / F: steeper, and without a scale."""

    name: ClassVar = "d2o-reciprocal"
    paper: ClassVar = Density.paper
    metric: ClassVar = Density.metric

    def split(self, problem: AllocationProblem) -> Allocation:
        least = min((value for value in problem.variance if value > 0), default=1.0)
        # a layer of no variance at all gets as much as the densest of the others
        return problem.by_weight([-math.log(max(value, least)) for value in problem.variance])
