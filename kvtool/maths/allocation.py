"""Split a total over layers or heads in whole tokens: the only place where budgets are rounded.

Weights are logarithms, so that a weight of e^-600 is a share of next to nothing and no underflow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = 200  # halvings of the bracket; a float64 has 53 bits, the bracket some 10 more
_WHOLE = 1e-9  # a share this close below a whole number is that number


@dataclass(frozen=True)
class Allocation:
    """Tokens of each layer.

    Attributes:
        tokens: whole numbers within their limits.
        asked: the total asked for; the sum differs only where the limits rule it out.
    """

    tokens: list[int]
    asked: int

    @property
    def total(self) -> int:
        """Sum the tokens of the layers."""
        return sum(self.tokens)

    @property
    def clamped(self) -> bool:
        """Tell whether the limits ruled the total out, so that the nearest possible one is held."""
        return self.total != self.asked


def allocate(
    log_weights: Sequence[float], total: int, lo: Sequence[int], hi: Sequence[int]
) -> Allocation:
    """Split a total in proportion to weights, within limits.

    Layers that no limit binds keep the ratios of their weights (water-filling); what rounding down
    leaves goes one by one to the largest remainders, ties to the lower index.

    >>> allocate([0.0, 0.0, 0.0], 100, [0, 0, 0], [100, 100, 100]).tokens
    [34, 33, 33]

    Args:
        log_weights: natural logarithms of the weights, finite; any scale.
        total: tokens to hand out; one outside the limits becomes the nearest one inside.
        lo: least of each layer, 0 or more.
        hi: most of each layer, not below `lo`.
    """
    if not len(log_weights) == len(lo) == len(hi) > 0:
        raise ValueError(f"{len(log_weights)} weights, {len(lo)} lower and {len(hi)} upper limits")
    if any(not 0 <= low <= high for low, high in zip(lo, hi, strict=True)):
        raise ValueError("a lower limit is negative or above its upper limit")
    if not all(math.isfinite(weight) for weight in log_weights):
        raise ValueError("a weight is infinite or no number")
    lo, hi = [int(low) for low in lo], [int(high) for high in hi]
    possible = min(max(int(total), sum(lo)), sum(hi))
    shares = _fill(_centred(log_weights), possible, lo, hi)
    return Allocation(_round(shares, possible, lo, hi), int(total))


def _centred(log_weights: Sequence[float]) -> list[float]:
    highest = max(float(weight) for weight in log_weights)
    return [float(weight) - highest for weight in log_weights]


def _fill(log_weights: list[float], total: int, lo: list[int], hi: list[int]) -> list[float]:
    """Return the real-valued shares clip(exp(level + weight), lo, hi) that sum to the total."""

    def shares(level: float) -> list[float]:
        return [
            min(max(_exp(level + weight), low), high)
            for weight, low, high in zip(log_weights, lo, hi, strict=True)
        ]

    # at `low` even the heaviest share is below a millionth, at `high` even the lightest is at its
    # limit
    low, high = math.log(1e-6), math.log(max(hi) + 1) - min(log_weights)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if math.fsum(shares(middle)) < total:
            low = middle
        else:
            high = middle
    return shares(high)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _round(shares: list[float], total: int, lo: list[int], hi: list[int]) -> list[int]:
    tokens = [
        min(max(math.floor(share + _WHOLE), low), high)
        for share, low, high in zip(shares, lo, hi, strict=True)
    ]
    left = total - sum(tokens)
    step = 1 if left >= 0 else -1
    # a unit moves every remainder by 1, so a second round would keep the order of the first
    order = sorted(range(len(shares)), key=lambda i: (step * (tokens[i] - shares[i]), i))
    while left:
        for i in order:
            if left and lo[i] <= tokens[i] + step <= hi[i]:
                tokens[i] += step
                left -= step
    return tokens
