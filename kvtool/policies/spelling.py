"""How the settings of a part of a policy are declared and written; free of torch."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any

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
