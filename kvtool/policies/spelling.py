"""How the settings of a part of a policy are written; free of torch, as planning is."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


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
