"""How buffers that are appended to grow: the rule by which a cache allocates and a forecast counts.

A quarter more each time, so that appending copies O(1) per token.
"""

from __future__ import annotations

STEP = 16
"""Slots that a buffer grows by beyond its quarter."""


def grown(capacity: int, slots: int) -> int:
    """Count the slots of a full buffer once it has taken in enough to hold `slots`.

    >>> grown(0, 100), grown(100, 101), grown(100, 400)
    (100, 141, 400)
    """
    return max(slots, capacity + capacity // 4 + STEP) if capacity else slots
