"""Many rows of a long context, where a small cache pays: tokens a second and memory."""

from __future__ import annotations

from collections.abc import Iterator

from recipes.benchmarks.gpu.decode import STATIC, copy_case, step_case, table
from recipes.benchmarks.gpu.results import Case
from recipes.benchmarks.gpu.settings import Settings

__all__ = ["TITLE", "cases", "table"]
TITLE = "batches of an 8B shape, random weights, bfloat16, beside the full cache"
CAPTURED = ("h2o", "snapkv", "rocketkv", "quest")


def contexts(settings: Settings) -> list[tuple[int, int]]:
    """Rows and tokens of each."""
    return [(2, 96)] if settings.tiny else [(16, 32768), (8, 102400)]


def cases(settings: Settings) -> Iterator[Case]:
    """The full cache, what is captured in seconds, and one policy compiled."""
    yield copy_case(settings)
    for place, (rows, n) in enumerate(contexts(settings)):
        yield step_case(settings, rows, n, STATIC, "captured" if place else "compiled")
        for policy in CAPTURED[::3] if settings.tiny else CAPTURED:
            yield step_case(settings, rows, n, policy, "captured")
        if not place:
            yield step_case(settings, rows, n, "h2o", "compiled")
