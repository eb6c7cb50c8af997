"""Split a total over layers or heads in whole tokens: the only place where budgets are rounded.

Weights are logarithms, so that a weight of e^-600 is a share of next to nothing and no underflow.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

_STEPS = 200  # halvings of the bracket; a float64 has 53 bits, the bracket some 10 more
_NOTHING = 1e-6  # a share that is no token yet
_WHOLE = 1e-9  # a share this close below a whole number is that number


@dataclass(frozen=True)
class Allocation:
    """Tokens of each layer.

    Attributes:
        tokens: whole numbers within their limits.
        asked: the total asked for; the sum differs only where the limits rule it out.
        by_head: tokens of each KV head of each layer, whose mean is the layer's; None: all heads
            of a layer have as many.
    """

    tokens: list[int]
    asked: int
    by_head: list[list[int]] | None = None

    @property
    def total(self) -> int:
        """Sum the tokens of the layers."""
        return sum(self.tokens)

    @property
    def clamped(self) -> bool:
        """Return whether the limits ruled the total out, so that the nearest possible one is
        used."""
        return self.total != self.asked


def allocate(
    log_weights: Sequence[float], total: int, min_budgets: Sequence[int], max_budgets: Sequence[int]
) -> Allocation:
    """Split a total in proportion to weights, within limits.

    Layers that no limit binds keep the ratios of their weights (water-filling); what rounding down
    leaves goes one by one to the largest remainders, ties to the lower index.

    >>> allocate([0.0, 0.0, 0.0], 100, [0, 0, 0], [100, 100, 100]).tokens
    [34, 33, 33]

    Args:
        log_weights: natural logarithms of the weights, finite; any scale.
        total: tokens to hand out; one outside the limits becomes the nearest one inside.
        min_budgets: least of each layer, 0 or more.
        max_budgets: most of each layer, not below `min_budgets`.
    """
    if not all(math.isfinite(weight) for weight in log_weights):
        raise ValueError("a weight is infinite or no number")
    possible, min_budgets, max_budgets = _limits(total, min_budgets, max_budgets)
    shares = _fill(_near(log_weights, max(max_budgets)), possible, min_budgets, max_budgets)
    floors = [math.floor(share + _WHOLE) for share in shares]
    return Allocation(_round(shares, floors, possible, min_budgets, max_budgets), int(total))


def allocate_by_counts(
    counts: Sequence[int], total: int, min_budgets: Sequence[int], max_budgets: Sequence[int]
) -> Allocation:
    """Split a total in proportion to whole numbers, as `allocate` does, with exact remainders.

    >>> allocate_by_counts([1, 2, 3], 10, [0, 0, 0], [10, 10, 10]).tokens
    [2, 3, 5]

    Args:
        counts: 1 or more each.
    """
    possible, min_budgets, max_budgets = _limits(total, min_budgets, max_budgets)
    shares = _fill_exactly(counts, possible, min_budgets, max_budgets)
    floors = [math.floor(share) for share in shares]
    return Allocation(_round(shares, floors, possible, min_budgets, max_budgets), int(total))


def _limits(
    total: int, min_budgets: Sequence[int], max_budgets: Sequence[int]
) -> tuple[int, list[int], list[int]]:
    """Return the possible total, and the limits as lists of integers."""
    low, high = list(map(int, min_budgets)), list(map(int, max_budgets))
    return min(max(int(total), sum(low)), sum(high)), low, high


def _near(log_weights: Sequence[float], most: int) -> list[float]:
    """Move weights together that are so far apart that their order alone counts, the highest to 0.

    A share grows from nothing to its limit while the level rises by less than `apart`. A wider gap
    changes no share, and the level would need more digits than a float has.
    """
    apart = math.log(most + 1) - math.log(_NOTHING) + 1
    weights = [float(weight) for weight in log_weights]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    moved = [0.0] * len(weights)
    base, place = weights[order[0]], 0.0
    for above, i in itertools.pairwise(order):
        if weights[above] - weights[i] > apart:
            base, place = weights[i], moved[above] - apart
        moved[i] = place + (weights[i] - base)
    return moved


def _fill(
    log_weights: list[float], total: int, min_budgets: list[int], max_budgets: list[int]
) -> list[float]:
    """Return the real shares, exp(level + weight) within the limits, that sum to the total."""

    def shares(level: float) -> list[float]:
        return [
            min(max(_exp(level + weight), low), high)
            for weight, low, high in zip(log_weights, min_budgets, max_budgets, strict=True)
        ]

    # at `low` even the heaviest share is next to nothing, at `high` even the lightest is at its
    # limit
    low, high = math.log(_NOTHING), math.log(max(max_budgets) + 1) - min(log_weights)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if math.fsum(shares(middle)) < total:
            low = middle
        else:
            high = middle
    return shares(high)


def _fill_exactly(
    counts: Sequence[int], total: int, min_budgets: list[int], max_budgets: list[int]
) -> list[Fraction]:
    """Return the shares, level * count within the limits, that sum to the total."""

    rows = zip(counts, min_budgets, max_budgets, strict=True)
    limits = [(count, Fraction(low), Fraction(high)) for count, low, high in rows]

    def shares(level: Fraction) -> list[Fraction]:
        return [min(max(level * count, low), high) for count, low, high in limits]

    # the sum grows with the level, straight between the levels at which a share meets a limit
    bends = sorted({end / count for count, low, high in limits for end in (low, high)})
    place = bisect_right(bends, Fraction(total), key=lambda level: sum(shares(level), Fraction()))
    level = bends[max(place - 1, 0)]
    held = shares(level)
    moving = [n for n, low, high in limits if low <= level * n < high]
    if not moving:
        return held
    return shares(level + (total - sum(held, Fraction())) / sum(moving))


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _round(
    shares: Sequence[float | Fraction],
    floors: list[int],
    total: int,
    min_budgets: list[int],
    max_budgets: list[int],
) -> list[int]:
    """Hand out what rounding down leaves, one by one to the largest remainders."""
    tokens = [
        min(max(n, low), high)
        for n, low, high in zip(floors, min_budgets, max_budgets, strict=True)
    ]
    left = total - sum(tokens)
    # a unit moves every remainder by 1, so a second round would keep the order of the first
    order = sorted(range(len(shares)), key=lambda i: (tokens[i] - shares[i], i))
    while left:
        for i in order:
            if left and tokens[i] < max_budgets[i]:
                tokens[i] += 1
                left -= 1
    return tokens
