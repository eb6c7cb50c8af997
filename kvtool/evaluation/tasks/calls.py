"""Small Python functions that call each other, for `code_run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_LARGEST_ADDED = 9


@dataclass(frozen=True)
class Function:
    """A function that adds a number, other than 0, to its argument or to what another returns.

    Attributes:
        name: of `func_NAME`.
        calls: the name of the other function, None if it calls none.
    """

    name: int
    calls: int | None
    added: int

    def __str__(self) -> str:
        inner = "x" if self.calls is None else f"func_{self.calls}(x)"
        sign = "+" if self.added > 0 else "-"
        return f"def func_{self.name}(x):\n    return {inner} {sign} {abs(self.added)}\n"


def call_chain(rng: np.random.Generator, names: Sequence[int]) -> list[Function]:
    """Draw functions that each call the next."""
    callees = [*names[1:], None]
    return [Function(name, calls, _added(rng)) for name, calls in zip(names, callees, strict=True)]


def unrelated_functions(
    rng: np.random.Generator, names: Sequence[int], deepest: int
) -> list[Function]:
    """Draw functions that call earlier ones of the list, or none.

    Args:
        deepest: functions that a call goes through at most.
    """
    functions: list[Function] = []
    depths: list[int] = []
    for name in names:
        callee = int(rng.integers(-1, len(functions)))
        if callee < 0 or depths[callee] == deepest:
            functions.append(Function(name, None, _added(rng)))
            depths.append(1)
        else:
            functions.append(Function(name, functions[callee].name, _added(rng)))
            depths.append(depths[callee] + 1)
    return functions


def _added(rng: np.random.Generator) -> int:
    size = int(rng.integers(1, _LARGEST_ADDED + 1))
    return size if rng.random() < 0.5 else -size
