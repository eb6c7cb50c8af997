"""Tiers: `pytest` takes a few cases of each product, `-m exhaustive` others, `-m slow` the rest.

A test marked `each_once` runs by default only enough of its cases to have every value of every
`parametrize` in one; of one marked `few(n)`, n cases (of those, if it is both). The others are
marked `exhaustive`; of `each_once`, those that are needed to have every two values together, and
what is left then, `slow`. A case or a test that is too dear for the default run is marked
`exhaustive` itself, where it is written.
"""

import itertools
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

import pytest


def each_once(cases: Sequence[Mapping[str, Hashable]], together: int = 1) -> set[int]:
    """Choose few cases that hold every value of every axis, values used about equally often.

    Args:
        cases: of each, its value by axis.
        together: how many values have to meet in a case: 2 for every pair that some case has.

    Returns:
        Indices of those chosen, the same ones for the same cases.
    """
    sides = [set(itertools.combinations(case.items(), min(together, len(case)))) for case in cases]
    left, used, chosen = set().union(*sides), Counter(), set()
    while left:
        best = max(
            range(len(sides)),
            key=lambda i: (len(sides[i] & left), -sum(used[side] for side in sides[i]), -i),
        )
        chosen.add(best)
        left -= sides[best]
        used.update(sides[best])
    return chosen


def axes(item: pytest.Item) -> dict[str, str]:
    """A case's values, one for each `parametrize` and each fixture with parameters."""
    params = {name: repr(value) for name, value in item.callspec.params.items()}
    found = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.split(",") if isinstance(names, str) else names
        found[str(names)] = "|".join(params.pop(name.strip()) for name in names)
    return found | params


def few(count: int, cases: Sequence[int]) -> set[int]:
    """Choose a number of cases, spread over all: the first one, and others at equal steps."""
    return {cases[i * len(cases) // count] for i in range(min(count, len(cases)))}


def mark_the_rest(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of `each_once` and `few` tests that were not chosen."""
    groups = defaultdict(list)
    for item in items:
        if item.get_closest_marker("each_once") or item.get_closest_marker("few"):
            groups[item.path, item.originalname].append(item)
    for group in groups.values():
        chosen = paired = set(range(len(group)))
        if group[0].get_closest_marker("each_once"):
            cases = [axes(item) for item in group]
            chosen, paired = each_once(cases), each_once(cases, together=2)
        if mark := group[0].get_closest_marker("few"):
            chosen = few(*mark.args, sorted(chosen))
        for i, item in enumerate(group):
            if i not in chosen:
                item.add_marker(pytest.mark.exhaustive if i in paired else pytest.mark.slow)


def read_part(text: str) -> tuple[int, int]:
    """Read `2/6`, the second sixth.

    Raises:
        pytest.UsageError: there is no such part.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
    part, parts = map(int, found.groups()) if found else (0, 0)
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--part {text} is no part; --part 2/6 is the second sixth")
    return part, parts


def in_part(name: str, part: int, parts: int) -> bool:
    """Tell by the hash of a case's name whether it is in a part: in the same one for ever."""
    return zlib.crc32(name.encode()) % parts == part - 1


def first(count: int, values: Iterable) -> list:
    """Values for `parametrize`, all but a number of first ones marked for the exhaustive tier."""
    return first_rows(count, ((value,) for value in values))


def first_rows(count: int, rows: Iterable[tuple]) -> list:
    """The same for rows of values, one for each name."""
    rows = list(rows)
    rest = (pytest.param(*row, marks=pytest.mark.exhaustive) for row in rows[count:])
    return [*(pytest.param(*row) for row in rows[:count]), *rest]
