"""How the settings of a part of a policy are declared and written; free of torch."""

from __future__ import annotations

import math
from dataclasses import field, fields
from typing import Any

from kvtool.errors import UsageError, quote
from kvtool.sizes import LARGEST_SEED, MOST_TOKENS

_COMPUTED = "computed"


def computed(default: str) -> Any:
    """Declare a parameter whose default, None, stands for a number that is computed.

    Args:
        default: what from, as a reader of `kvtool policies` should see it: `budget/2`.
    """
    return field(default=None, metadata={_COMPUTED: default})


def defaults(part: type) -> dict[str, Any]:
    """Return the default of every parameter by name; of a computed one, what it comes from."""
    return {each.name: each.metadata.get(_COMPUTED, each.default) for each in fields(part)}


def spell_settings(part: Any) -> str:
    """Write the parameters that differ from their defaults, `(recent=8)`; nothing if none does.

    Args:
        part: a frozen dataclass whose fields all have defaults.
    """
    given = [
        f"{field.name}={_spell(getattr(part, field.name))}"
        for field in fields(part)
        if getattr(part, field.name) != field.default
    ]
    return f"({','.join(given)})" if given else ""


def _spell(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def check_numbers(part: Any) -> None:
    """Refuse settings that no cache can count to, and such that are no number.

    Args:
        part: a frozen dataclass.

    Raises:
        UsageError: the first setting that is not finite or above what 32 bits (seeds: 64) hold.
    """
    for each in fields(part):
        value = getattr(part, each.name)
        label = f"{getattr(part, 'modifier', None) or part.name}: {each.name}"
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{label} must be a finite number, got {value}")
        most = LARGEST_SEED if each.name == "seed" else MOST_TOKENS
        if isinstance(value, int) and value > most:
            raise UsageError(f"{label} must be at most {most}, got {quote(value)}")
