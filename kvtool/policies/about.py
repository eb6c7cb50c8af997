"""What there is to say of one policy or modifier, from its class and the file that it is in."""

import inspect
import re
import sys
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

from kvtool.errors import UsageError, did_you_mean, quote
from kvtool.policies.outside import build_outside, is_outside
from kvtool.policies.spelling import defaults, field_types, read_part, split_outside
from kvtool.policies.table import (
    BASES,
    MODIFIERS,
    REFUSED,
    Entry,
    describe,
    describe_base,
    modifiers_of,
    policy_class,
)

_ARGUMENT = re.compile(r"    (\w+): (.*)")


@dataclass(frozen=True)
class Setting:
    """A parameter.

    Attributes:
        default: one that is computed is told as what it comes from.
        values: that it may have; empty: any of its type.
    """

    name: str
    default: Any
    values: tuple[Any, ...]
    meaning: str


@dataclass(frozen=True)
class About:
    """A policy or modifier in full.

    Attributes:
        takes: modifiers that go on a base, with the spelling of the base where a setting of it is
            needed for them.
        text: how it works and where it differs from its paper, as the head of its file says it.
    """

    entry: Entry
    settings: tuple[Setting, ...]
    takes: dict[str, str]
    text: str


def about(name: str) -> About:
    """Find a policy or modifier by its name, with or without a `+` before it, in any case.

    A score from outside is imported by its module and class.

    Raises:
        UsageError: there is none of this name.
    """
    if is_outside(name):
        return _about_outside(name)
    key = name.strip().lower().removeprefix("+")
    if key in REFUSED:
        raise UsageError(f"policy `{key}` is not offered: {REFUSED[key]}")
    if key not in BASES | MODIFIERS:
        raise UsageError(
            f"no policy or modifier named {quote(name)}",
            hint=did_you_mean(key, BASES | MODIFIERS) or "`kvtool policies` lists them",
        )
    entries = describe()
    entry = next(each for each in entries if each.name == key)
    cls = policy_class(key)
    takes = {
        each.name: spelled
        for each in entries
        for spelled in each.goes_on
        if spelled.partition("(")[0] == key
    }
    return About(entry, _settings(cls), takes, _text(cls))


def _about_outside(name: str) -> About:
    """Describe a score by its module and class; what it is set to and modified by is left out."""
    cls = type(build_outside(*read_part(split_outside(name, "+")[0]), imports=True))
    entry = describe_base(f"{cls.__module__}:{cls.__qualname__}", cls)
    return About(entry, _settings(cls), modifiers_of(cls), _text(cls))


def _text(cls: type) -> str:
    return inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "")


def _settings(cls: type) -> tuple[Setting, ...]:
    shown, meanings, hints = defaults(cls), _meanings(cls), field_types(cls)
    return tuple(
        Setting(each.name, shown[each.name], _values(hints[each.name]), meanings.get(each.name, ""))
        for each in fields(cls)
    )


def _meanings(cls: type) -> dict[str, str]:
    """Read what the docstring of a class says of its arguments."""
    found: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(cls.__doc__ or "").partition("Args:\n")[2].splitlines():
        begins = _ARGUMENT.fullmatch(line)
        if begins:
            name = begins[1]
            found[name] = begins[2]
        elif name:
            found[name] += f" {line.strip()}"
    return {name: text.strip() for name, text in found.items()}


def _values(kind: Any) -> tuple[Any, ...]:
    if kind is bool:
        return (True, False)
    return get_args(kind) if get_origin(kind) is Literal else ()
