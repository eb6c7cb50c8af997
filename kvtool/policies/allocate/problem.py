"""What there is to split, and what may be known about it: all that an allocator is shown.

Only layers whose budget is free stand here: not those with a sliding window or without attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.maths.allocation import Allocation, allocate

UNLIMITED = 2**30  # tokens of a head that keeps everything, whatever comes


@dataclass(frozen=True)
class ErrorCurves:
    """How far each layer's attention output moves under each of a few budgets.

    Attributes:
        budgets: tokens per layer and KV head, ascending.
        errors: layers x budgets, 0 or more.
    """

    budgets: Sequence[int]
    errors: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Room:
    """A total to split over layers, for a prompt of a known length.

    Attributes:
        total: tokens of all layers together, per KV head.
        lo: least of each layer.
        hi: most of each layer: the tokens of the prompt.
        window: newest tokens that every layer keeps, where the policy has such a window.
        variance: F of each layer (see `kvtool.policies.allocate.d2o`), None if not measured.
        largest: the largest F that each layer could have had, n - 1 over a prompt of n tokens.
        curves: output error against budget, None if not measured.
    """

    total: int
    lo: Sequence[int]
    hi: Sequence[int]
    window: int | None = None
    variance: Sequence[float] | None = None
    largest: Sequence[float] | None = None
    curves: ErrorCurves | None = None

    @property
    def layers(self) -> int:
        """How many layers share the total."""
        return len(self.lo)

    def by_weight(self, log_weights: Sequence[float]) -> Allocation:
        """Split in proportion to weights, given as logarithms."""
        return allocate(log_weights, self.total, self.lo, self.hi)
