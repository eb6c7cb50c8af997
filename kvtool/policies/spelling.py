"""Declare, read and write the settings of a policy's parts; free of torch."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import field, fields
from inspect import get_annotations
from types import SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvtool.errors import UsageError, did_you_mean, quote
from kvtool.policies.parts import Score
from kvtool.sizes import LARGEST_SEED, MOST_TOKENS

_COMPUTED, _LIMIT = "computed", "limit"  # keys of the metadata of fields
_LONGEST = 20_000  # characters, of a list of policies as well
_PART = re.compile(r"\s*([\w.:-]+)\s*(?:\((.*)\))?\s*", re.DOTALL)
_WHOLE = re.compile(r"[+-]?[0-9]{1,100}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,100}\.?[0-9]{0,100}|\.[0-9]{1,100})(?:e[+-]?[0-9]{1,3})?")


LIMITS: dict[str, Callable[[Any], bool]] = {
    "0 or more": lambda number: number >= 0,
    "1 or more": lambda number: number >= 1,
    "2 or more": lambda number: number >= 2,
    "odd and 1 or more": lambda number: number >= 1 and number % 2 == 1,
    "above 0": lambda number: number > 0,
    "above 0 and at most 1": lambda number: 0 < number <= 1,
    "above 0 and below 1": lambda number: 0 < number < 1,
    "between 0 and 1": lambda number: 0 <= number <= 1,
    "between -1 and 1": lambda number: -1 <= number <= 1,
    "4 or 8": lambda number: number in (4, 8),
}
"""Limits of numbers, in the words of an error."""


def limited(default: float, limit: str) -> Any:
    """Declare a number and its limit, in words of `LIMITS`."""
    return field(default=default, metadata={_LIMIT: limit})


def computed(default: str, limit: str | None = None) -> Any:
    """Declare a parameter whose default, None, is replaced by a number that is computed.

    Args:
        default: what from, as a reader of `kvtool policies` should see it: `budget/2`.
        limit: of what is given in its place, in words of `LIMITS`.
    """
    return field(default=None, metadata={_COMPUTED: default, _LIMIT: limit})


def defaults(part: type) -> dict[str, Any]:
    """Return the default of every parameter by name; of a computed one, what it comes from."""
    return {each.name: each.metadata.get(_COMPUTED, each.default) for each in fields(part)}


def split_outside(text: str, separator: str) -> list[str]:
    """Split a text at the separators outside of its parentheses.

    Raises:
        UsageError: a text that is longer than any policy or list of policies.
    """
    if len(text) > _LONGEST:
        raise UsageError(
            f"a policy has at most {_LONGEST} characters, got {len(text)}: {quote(text)}"
        )
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == separator and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def read_part(text: str) -> tuple[str, str]:
    """Split `name(key=value,..)` into its name, as typed, and what its parentheses hold.

    Raises:
        UsageError: a text of another form.
    """
    match = _PART.fullmatch(text)
    if not match:
        raise UsageError(
            f"cannot read {quote(text.strip())} in a policy", hint="the form is name(key=value,..)"
        )
    return match[1], match[2] or ""


def known_name(name: str, names: Iterable[str], kind: str) -> str:
    """Return a name of a table as the table has it, in any case as typed.

    Raises:
        UsageError: there is none of this name.
    """
    key = name.strip().lower()
    if key not in names:
        raise UsageError(
            f"no {kind} named {quote(name)}; choose one of: {', '.join(names)}",
            hint=did_you_mean(key, names),
        )
    return key


def field_types(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, and of nothing else that its classes annotate.

    Python 3.10 refuses to resolve a `ClassVar` that says no type.
    """
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        own = get_annotations(base)
        own = {each.name: own[each.name] for each in fields(cls) if each.name in own}
        names = vars(sys.modules[base.__module__]) if own else {}
        found |= get_type_hints(SimpleNamespace(__annotations__=own), names)
    return found


def read_settings(name: str, cls: type, text: str) -> dict[str, Any]:
    """Read the text between the parentheses of a part, `recent=8,positions=cache`.

    Args:
        name: of the part, for messages.
        cls: the frozen dataclass behind it.

    Raises:
        UsageError: what is no setting of this part, is given twice or has no such value.
    """
    known = {field.name for field in fields(cls)}
    values: dict[str, Any] = {}
    for item in split_outside(text, ",") if text.strip() else []:
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals or not key or not value:
            raise UsageError(
                f"cannot read {quote(item.strip())} in {quote(f'{name}({text})')}",
                hint="the form is key=value",
            )
        key = key.lower()
        if key not in known:
            offered = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
            raise UsageError(
                f"`{name}` has no parameter {quote(key)}; {offered}", hint=did_you_mean(key, known)
            )
        if key in values:
            raise UsageError(f"`{name}` is given `{key}` twice")
        values[key] = _read_value(f"{name}: {key}", value, field_types(cls)[key])
    return values


def _read_value(label: str, text: str, kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):
        if text.lower() in ("none", "null", "default"):
            return None
        kind = next(option for option in get_args(kind) if option is not type(None))
    if kind is str:
        return text  # a path, whose case matters
    text = text.lower()
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise UsageError(
                f"{label} must be one of {', '.join(get_args(kind))}, got {quote(text)}",
                hint=did_you_mean(text, get_args(kind)),
            )
        return text
    if kind is bool:
        if text not in ("true", "false"):
            raise UsageError(f"{label} must be true or false, got {quote(text)}")
        return text == "true"
    if kind not in (int, float):
        raise UsageError(f"{label} cannot be set in a policy string")
    form, noun = (_WHOLE, "a whole number") if kind is int else (_NUMBER, "a number")
    if not form.fullmatch(text):
        raise UsageError(f"{label} must be {noun}, got {quote(text)}")
    return kind(text)


def is_inside(cls: type) -> bool:
    """Return whether a class is one of the package."""
    return cls.__module__.partition(".")[0] == "kvtool"


def part_name(part: Any) -> str:
    """Return what a part is called in a policy string; one from outside by its module."""
    cls = type(part)
    if isinstance(part, Score) and not is_inside(cls) and cls.__qualname__.isidentifier():
        return f"{cls.__module__}:{cls.__qualname__}"
    return getattr(part, "modifier", None) or part.name


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
    """Refuse settings beyond their limits, that no cache can count to, and such that are no number.

    Args:
        part: a frozen dataclass.

    Raises:
        UsageError: the first setting that is not finite, above what 32 bits (seeds: 64) hold or
            beyond the limit that it is declared with.
    """
    for each in fields(part):
        value = getattr(part, each.name)
        limit = each.metadata.get(_LIMIT)
        most = LARGEST_SEED if each.name == "seed" else MOST_TOKENS
        if isinstance(value, float) and not math.isfinite(value):
            right = "a finite number"
        elif isinstance(value, int) and value > most:
            right = f"at most {most}"
        elif limit is not None and value is not None and not LIMITS[limit](value):
            right = limit
        else:
            continue
        raise UsageError(f"{part_name(part)}: {each.name} must be {right}, got {value}")
