"""Scalars of YAML and JSON, by the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2, 10.3).

`on`, `yes`, `3:1`, `010` and dates are not what YAML 1.1 made of them; `1e-5` is a number.
"""

from __future__ import annotations

import math
import re
from typing import Any

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOLEAN = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


def read_plain(text: str) -> Any:
    """Give a YAML scalar without quotes its value.

    >>> [read_plain(text) for text in ("on", "3:1", "010", "0x10", "1e-5", "~")]
    ['on', '3:1', 10, 16, 1e-05, None]

    Raises:
        ValueError: a number too long, infinite or none; half of a surrogate pair.
    """
    if text in _NULL:
        return None
    if text in _BOOLEAN:
        return _BOOLEAN[text]
    if _INTEGER.fullmatch(text):
        return read_integer(text)
    if _FLOAT.fullmatch(text):
        return read_finite(text.replace(".inf", "inf").replace(".nan", "nan").lower(), text)
    return join_surrogates(text)


def read_integer(text: str) -> int:
    """Read a whole number, which is not of thousands of digits."""
    if len(text) > 100:
        raise ValueError(f"a number of {len(text)} digits")
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text[2:], base) if base != 10 else int(text)


def read_finite(text: str, typed: str) -> float:
    """Read a number that is neither infinite nor none."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"`{typed}` is not a finite number")
    return value


def join_surrogates(text: str) -> str:
    """Join surrogates that escapes spelled out, as JSON does and YAML does not."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise ValueError("half of a surrogate pair") from None
