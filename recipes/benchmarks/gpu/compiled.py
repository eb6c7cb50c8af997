"""Compiled steps of one row, a minute of compiling each."""

from __future__ import annotations

from collections.abc import Iterator

from recipes.benchmarks.gpu.decode import STATIC, long, release, step_case, table
from recipes.benchmarks.gpu.results import Case
from recipes.benchmarks.gpu.settings import Settings

__all__ = ["TITLE", "cases", "release", "table"]
TITLE = "compiled steps of an 8B shape"


def cases(settings: Settings) -> Iterator[Case]:
    """One of each kind: full caches, what evicts and what reads."""
    for policy in (STATIC, "h2o", "quest", "full"):
        yield step_case(settings, 1, long(settings), policy, "compiled")
