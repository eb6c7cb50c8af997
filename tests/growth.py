"""How much longer something takes that is larger: a ratio in one process, alike on any machine."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable

FEW, MANY = 2500, 40_000
TRIES = 2


def assert_time_grows_with_size(make: Callable[[int], Callable[[], object]]) -> None:
    """Expect `MANY` to take about `MANY / FEW` times as long as `FEW`, not the square of that.

    Args:
        make: returns what is timed, for a size; making it is not timed.

    Raises:
        AssertionError: it takes longer than halfway, in powers, from the one to the other.
    """
    taken: dict[int, float] = {}
    gc.collect()
    gc.freeze()  # a worker's other objects are not looked at again and again
    try:
        for size in (FEW, MANY) * TRIES:
            run = make(size)
            start = time.process_time()
            run()
            taken[size] = min(taken.get(size, math.inf), time.process_time() - start)
    finally:
        gc.unfreeze()
    ratio = taken[MANY] / taken[FEW]
    assert ratio < (MANY / FEW) ** 1.5, f"{MANY} take {ratio:.0f} times as long as {FEW}"
