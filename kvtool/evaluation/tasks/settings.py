"""Types of settings that tasks share, read as people type them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PositiveInt

from kvtool.documents.document import TokenCount
from kvtool.sizes import parse_count


def _count(value: Any) -> Any:
    return parse_count(value) if isinstance(value, str) else value


def _counts(value: Any) -> Any:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)):
        parts = [parts]
    counts = [_count(part) for part in parts]
    try:
        return list(dict.fromkeys(counts))
    except TypeError:  # a list or mapping among them, which the type refuses
        return counts


Samples = Annotated[PositiveInt, Field(le=1_000_000)]
"""How many samples of a kind a task has."""

Tokens = Annotated[TokenCount, BeforeValidator(_count)]
"""A number of tokens: `4096` or `4K`."""

Lengths = Annotated[
    tuple[TokenCount, ...],
    Field(max_length=1000),
    BeforeValidator(_counts),
]
"""Numbers of tokens: `[1K, 4K]`, `1K,4K` or one of them; each counts once."""
