"""Policy strings: text to policy and back.

The form is `BASE[(key=value,..)][+MODIFIER[(key=value,..)]]..`, such as `h2o(recent=8)+caote`.
"""

import re
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kvtool.errors import UsageError, did_you_mean, quote
from kvtool.policies.allocate.room import Allocator, HeadSplit
from kvtool.policies.parts import Evicted, Rescore, Score
from kvtool.policies.policy import Policy
from kvtool.policies.read.reader import Read
from kvtool.policies.scores.full import Full
from kvtool.policies.spelling import spell_settings
from kvtool.policies.table import BASES, MODIFIERS, REFUSED, policy_class

_WHOLE = re.compile(r"[+-]?[0-9]{1,100}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,100}\.?[0-9]{0,100}|\.[0-9]{1,100})(?:e[+-]?[0-9]{1,3})?")
_PART = re.compile(r"\s*([A-Za-z0-9_-]+)\s*(?:\((.*)\))?\s*", re.DOTALL)


def parse_policy(text: str) -> Policy:
    """Read a policy string.

    >>> str(parse_policy("H2O( recent = 8 )+CAOTE"))
    'h2o(recent=8)+caote'

    Args:
        text: as typed, in any case but for paths of files; a `Policy` is returned as it is.

    Raises:
        UsageError: a name, parameter, value or combination that does not exist or makes no sense.
    """
    if isinstance(text, Policy):
        return text
    if not text.strip():
        raise UsageError(f"the policy is empty; choose one of: {', '.join(BASES)}")
    base, *rest = _split(text, "+")
    score = _build(base, BASES, "policy")
    for part in rest:
        name = _PART.fullmatch(part)
        if name and name[1].lower() in BASES:
            raise _base_as_modifier(name[1].lower(), score.name)
    return _put_together(score, [_build(part, MODIFIERS, "modifier") for part in rest])


def read_spelling(text: str) -> Policy:
    """Read back what `str` wrote, also of a policy whose reader was put on its score in Python."""
    base, *rest = _split(text, "+")
    modifiers = [_build(part, BASES | MODIFIERS, "modifier") for part in rest]
    return _put_together(_build(base, BASES, "policy"), modifiers)


def _put_together(score: Score | Read, modifiers: list[Any]) -> Policy:
    rescores = [part for part in modifiers if isinstance(part, Rescore)]
    heads = [part for part in modifiers if isinstance(part, HeadSplit)]
    layers = [part for part in modifiers if isinstance(part, Allocator) and part not in heads]
    evicted = [part for part in modifiers if isinstance(part, Evicted)]
    read = _one([part for part in (score, *modifiers) if isinstance(part, Read)])
    return Policy(
        Full() if isinstance(score, Read) else score,
        _one(rescores),
        _one(layers),
        _one(heads),
        _one(evicted),
        read,
    )


def _base_as_modifier(name: str, base: str) -> UsageError:
    if issubclass(policy_class(name), Read):
        return UsageError(
            f"`{name}` is a base policy that keeps everything and reads some of it, "
            f"so it cannot modify `{base}`",
            hint="in Python a reader goes on other scores: Policy(score, read=reader)",
        )
    return UsageError(
        f"`{name}` is a base policy and cannot modify `{base}`",
        hint=f"modifiers: {', '.join(MODIFIERS)}",
    )


def _one(parts: list[Any]) -> Any:
    """Return the only modifier of its kind, None if there is none."""
    if len(parts) > 1:
        names = [_name(part) for part in parts]
        twice = len(set(names)) < len(names)
        raise UsageError(
            f"modifier `{names[0]}` is given twice"
            if twice
            else f"modifiers `{names[0]}` and `{names[1]}` exclude each other; keep one"
        )
    return parts[0] if parts else None


def format_policy(policy: Policy) -> str:
    """The canonical spelling: lower case, only the parameters that differ from their defaults."""
    parts = (policy.score, policy.rescore, policy.evicted, policy.allocate, policy.heads)
    if policy.read is not None:
        parts = (policy.read,) if policy.score == Full() else (*parts, policy.read)
    return "+".join(_format(part) for part in parts if part is not None)


def _name(part: Score | Read | Rescore | Allocator | Evicted) -> str:
    return part.modifier if isinstance(part, Allocator) else part.name


def _format(part: Score | Read | Rescore | Allocator | Evicted) -> str:
    return _name(part) + spell_settings(part)


def _split(text: str, separator: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _build(text: str, table: dict[str, str], kind: str) -> Any:
    match = _PART.fullmatch(text)
    if not match:
        raise UsageError(
            f"cannot read {quote(text.strip())} in a policy", hint="the form is name(key=value,..)"
        )
    name, arguments = match[1].lower(), match[2]
    if name in REFUSED:
        raise UsageError(f"policy `{name}` is not offered: {REFUSED[name]}")
    if name not in table:
        raise UsageError(
            f"no {kind} named {quote(name)}; choose one of: {', '.join(table)}",
            hint=did_you_mean(name, table),
        )
    cls = policy_class(name)
    return cls(**_read_arguments(name, cls, arguments or ""))


def _read_arguments(name: str, cls: type, text: str) -> dict[str, Any]:
    known = {field.name for field in fields(cls)}
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for item in _split(text, ",") if text.strip() else []:
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
        values[key] = _read_value(f"{name}: {key}", value, hints[key])
    return values


def _read_value(label: str, text: str, kind: Any) -> Any:
    if isinstance(kind, UnionType):
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
    form, noun = (_WHOLE, "a whole number") if kind is int else (_NUMBER, "a number")
    if not form.fullmatch(text):
        raise UsageError(f"{label} must be {noun}, got {quote(text)}")
    return kind(text)
