"""Points and lines that would hide each other: set side by side, or found so as to show them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

_NEAR = 0.005  # of the range of all lines: closer ones hide each other


def neighbours(places: Sequence[float], *, near: float) -> list[list[int]]:
    """Return the indices of places that are nearly the same, groups and members ascending.

    Neighbours that differ by a factor of at most `near` make a group, equal ones in the order
    given.

    >>> neighbours([64.0, 256.0, 65.0], near=1.1)
    [[0, 2], [1]]
    """
    order = sorted(range(len(places)), key=lambda i: (places[i], i))
    groups = [order[:1]] if order else []
    for before, i in pairwise(order):
        if places[i] <= places[before] * near:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def dodge(places: Sequence[float], *, near: float, step: float) -> list[float]:
    """Return places on a log axis, moved apart where several are nearly the same.

    The members of each group of `neighbours` stand `step` (a factor) apart in their order, around
    the group's middle.

    >>> dodge([64.0, 64.0, 256.0], near=1.0, step=4.0)
    [32.0, 128.0, 256.0]
    """
    moved = list(places)
    for group in neighbours(places, near=near):
        middle = (places[group[0]] * places[group[-1]]) ** 0.5 if len(group) > 1 else 0.0
        for rank, i in enumerate(group):
            if len(group) > 1:
                moved[i] = middle * step ** (rank - (len(group) - 1) / 2)
    return moved


def covered(
    lines: Sequence[Mapping[float, float | None]], colours: Sequence[str] | None = None
) -> list[dict[tuple[float, float], int]]:
    """Return, for each line, its pieces that later lines lie on, and of how many colours these are.

    >>> covered([{1: 0.5, 2: 0.5, 3: 0.5}, {1: 0.0, 2: 1.0}, {1: 0.5, 2: 0.5, 3: 0.0}])
    [{(1, 2): 1}, {}, {}]

    Args:
        lines: y by x, x ascending; None and NaN are gaps.
        colours: of each line; None: all differ. A line covers none of its own colour.
    """
    drawn_in = range(len(lines)) if colours is None else colours
    drawn = [
        {x: y for x, y in line.items() if y is not None and not math.isnan(y)} for line in lines
    ]
    values = [y for line in drawn for y in line.values()]
    near = _NEAR * (max(values) - min(values)) if values else 0.0

    def lies_on(other: Mapping[float, float], line: Mapping[float, float], x: float) -> bool:
        return x in other and abs(other[x] - line[x]) <= near

    found = []
    for i, line in enumerate(drawn):
        later = [j for j in range(i + 1, len(drawn)) if drawn_in[j] != drawn_in[i]]
        counts = {
            (x, after): len(
                {
                    drawn_in[j]
                    for j in later
                    if lies_on(drawn[j], line, x) and lies_on(drawn[j], line, after)
                }
            )
            for x, after in pairwise(line)
        }
        found.append({piece: count for piece, count in counts.items() if count})
    return found
