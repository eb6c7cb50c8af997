"""Write documents as indented JSON."""

from __future__ import annotations

import json
from typing import Any

from kvtool.errors import printable

_STEP = "  "


def dump_json(value: Any, margin: str = "") -> str:
    """Write dictionaries, lists and scalars, indented.

    >>> print(dump_json({"a": [1, None], "b": ["x"]}))
    {
      "a": [1, null],
      "b": [
        "x"
      ]
    }
    """
    inner = margin + _STEP
    if isinstance(value, dict) and value:
        lines = [f"{inner}{_scalar(key)}: {dump_json(each, inner)}" for key, each in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{margin}}}"
    if isinstance(value, list) and not all(
        each is None or isinstance(each, (int, float)) for each in value
    ):
        return "[\n" + ",\n".join(inner + dump_json(e, inner) for e in value) + f"\n{margin}]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    plain = printable(value) if isinstance(value, str) else value
    return json.dumps(plain, ensure_ascii=False)
