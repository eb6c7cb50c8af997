"""Runs of neighbouring KV heads, which are read at once where they lie side by side."""

from __future__ import annotations

from collections.abc import Iterator


def head_runs(pairs: list[tuple[int, int]]) -> Iterator[tuple[int, slice]]:
    """Join neighbouring heads of a row.

    >>> list(head_runs([(0, 0), (0, 1), (0, 3), (1, 3)]))
    [(0, slice(0, 2, None)), (0, slice(3, 4, None)), (1, slice(3, 4, None))]

    Args:
        pairs: (row, KV head), in ascending order.
    """
    start = 0
    for i, (row, head) in enumerate(pairs, 1):
        if i == len(pairs) or pairs[i] != (row, head + 1):
            yield row, slice(pairs[start][1], head + 1)
            start = i
