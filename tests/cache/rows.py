"""Cases of several values each, of which the default tier runs the first."""

from collections.abc import Sequence

import pytest


def first_rows(count: int, rows: Sequence[tuple]) -> list:
    """`tests.tiers.first` for rows of values, one for each name of `parametrize`."""
    rest = (pytest.param(*row, marks=pytest.mark.exhaustive) for row in rows[count:])
    return [*rows[:count], *rest]
