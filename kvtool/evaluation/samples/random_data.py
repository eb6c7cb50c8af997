"""Random keys, strings and numbers, and what there is to ask about them."""

from __future__ import annotations

import itertools
import statistics
import string
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from kvtool.evaluation.samples.fit import Rng
from kvtool.evaluation.samples.needles import draw_uuids

_Item = TypeVar("_Item")
_CHARACTERS = np.array(list(string.ascii_lowercase + string.digits))
_TWO_DIGITS = np.arange(10, 100)
_DIFFERENT_NUMBERS = 24

STATISTICS: dict[str, Callable[[Sequence[int]], int]] = {
    "largest number": max,
    "smallest number": min,
    "second largest number": lambda numbers: sorted(set(numbers))[-2],
    "second smallest number": lambda numbers: sorted(set(numbers))[1],
    "median": statistics.median_low,
}
"""What can be asked about a list; for second places, equal numbers count once."""


def random_pairs(rng: Rng, count: int) -> list[tuple[str, str]]:
    """Draw keys with their values, all of them UUIDs."""
    return list(zip(draw_uuids(rng, count), draw_uuids(rng, count), strict=True))


def random_string(rng: Rng, shortest: int, longest: int) -> str:
    """Draw a string of lower-case letters and digits."""
    return "".join(rng.choice(_CHARACTERS, rng.integers(shortest, longest + 1)).tolist())


def random_numbers(rng: Rng, count: int) -> list[int]:
    """Draw an odd number of two-digit numbers, five or more, from 24 different ones.

    So few are used that even in a long list the largest number is not always 99. The first five
    differ from each other.
    """
    used = rng.choice(_TWO_DIGITS, _DIFFERENT_NUMBERS, replace=False)
    return [*used[:5].tolist(), *rng.choice(used, 2 * count).tolist()]


def random_calculation(rng: Rng, count: int) -> tuple[list[str], list[int]]:
    """Draw a calculation of two terms or more whose value stays from 0 to 99.

    Returns:
        Its terms (`["12", "+ 5", "- 9"]`) and the value after each (`[12, 17, 8]`).
    """
    values = [int(rng.integers(100))]
    terms = [str(values[0])]
    for _ in range(count + 1):
        before, after = values[-1], int(rng.integers(100))
        terms.append(f"{'+' if after >= before else '-'} {abs(after - before)}")
        values.append(after)
    return terms, values


def units_for(length: int, unit: int) -> int:
    """Return more than enough units of about `unit` tokens each to fill `length` tokens."""
    return 2 * length // max(1, unit) + 1


def spread(
    filler: Sequence[_Item], chosen: Sequence[_Item], fractions: Iterable[float]
) -> list[_Item]:
    """Put chosen items into a list, each after its fraction of the filler, from 0 to below 1."""
    result = list(filler)
    for fraction, item in sorted(
        zip(fractions, chosen, strict=True), key=lambda pair: pair[0], reverse=True
    ):
        result.insert(int(fraction * (len(filler) + 1)), item)
    return result


def assignments(value: int, names: Sequence[str]) -> list[str]:
    """State that a value goes to the first name and from each name on to the next.

    >>> assignments(48213, ["BA", "CE"])
    [' The value 48213: BA.', ' The value from BA: CE.']
    """
    first = f" The value {value}: {names[0]}."
    return [first, *(f" The value from {a}: {b}." for a, b in itertools.pairwise(names))]
