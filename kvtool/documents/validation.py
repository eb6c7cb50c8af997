"""Validation errors of pydantic, told in our words at the places of a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from kvtool.documents.problems import Keys, Mark, Problem
from kvtool.documents.tree import Node
from kvtool.errors import clip, did_you_mean, quote

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_SUGGESTIONS = 100  # mistakes for which near names are looked for, which takes long
_WAY = 100  # characters of the way to a value that are told
_NOUNS = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "mapping_type": "a mapping",
    "model_attributes_type": "a mapping",
    "model_type": "a mapping",
    "none_required": "null",
    "string_type": "text",
    "tuple_type": "a list",
}
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}


def find_problems(
    error: ValidationError, model: type[BaseModel], node: Node, at: Keys
) -> list[Problem]:
    """Turn what pydantic found into problems, in the order of the document.

    Args:
        model: what the value was validated with.
        node: the value.
        at: the way to it.
    """
    found: dict[tuple[Keys, bool], list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        keys = _keys(details, node)
        found.setdefault((keys, details["type"] == "extra_forbidden"), []).append(details)
    inner = {keys[:depth] for keys, _ in found for depth in range(len(keys))}
    problems: list[Problem] = []
    for (keys, unknown), group in found.items():
        if keys in inner and all(details["type"] in _NOUNS for details in group):
            continue  # another member of the union fits better, and tells why it does not fit
        suggest = len(problems) < _SUGGESTIONS
        message = _unknown(model, keys, suggest=suggest) if unknown else _message(group)
        mark = _mark(node, keys, key=unknown or group[0]["type"] == "missing")
        problems.append(Problem(mark, (*at, *keys), message))
    return sorted(problems, key=lambda problem: (problem.mark.name, problem.mark.index or 0))


def first_mistake(error: ValidationError) -> str:
    """Say what is wrong with a single value, such as that of a flag."""
    return _message(error.errors(include_url=False)[:1])


def reason(error: ValueError) -> str:
    """Say in one line what is wrong with data that stand in no document: the first mistake."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    way = ".".join(map(str, first["loc"]))
    return clip(f"{way[:_WAY]}: {_message([first])}" if way else _message([first]))


def _keys(details: ErrorDetails, node: Node) -> Keys:
    """Drop from pydantic's location what is not in the document: tags of unions, wrapped items."""
    keys: list[str | int] = []
    here: Node | None = node
    for part in details["loc"]:
        child = here.child(part) if here else None
        if child is not None:
            keys.append(part)
            here = child
    if details["type"] == "missing":
        keys.append(details["loc"][-1])
    return tuple(keys)


def _mark(node: Node, keys: Keys, *, key: bool) -> Mark:
    """Return the mark of the last node on the way: of its key if asked for and there is one."""
    for part in keys:
        child = node.child(part)
        if child is None:
            break
        node = child
    return node.key if key and node.key is not None else node.mark


def _message(group: list[ErrorDetails]) -> str:
    """Say what is wrong with one value; alternatives of a union are told together."""
    first = group[0]
    expected = list(dict.fromkeys(filter(None, map(_expected, group))))
    if len(expected) == len({_told(details) for details in group}):
        return f"must be {_either(expected)}, got {show(first['input'])}"
    return next(_told(details) for details in group if _expected(details) is None)


def _expected(details: ErrorDetails) -> str | None:
    """Say in a noun what would be right."""
    kind, context = details["type"], details.get("ctx", {})
    if kind == "literal_error":
        return context["expected"].replace("'", "`")
    if kind in _BOUNDS:
        word, bound = _BOUNDS[kind]
        return f"{word} {context[bound]}"
    return _NOUNS.get(kind)


def _told(details: ErrorDetails) -> str:
    expected, kind = _expected(details), details["type"]
    if expected is not None:
        return expected
    if kind == "missing":
        return "is required"
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, ValueError):
        return str(cause)
    if kind == "string_too_short" and not details["input"]:
        return "must not be empty"
    if kind in ("too_short", "too_long"):
        context = details["ctx"]
        bound = "at least" if kind == "too_short" else "at most"
        count = context.get("min_length", context.get("max_length"))
        return f"must hold {bound} {count}, got {context['actual_length']}"
    message = details["msg"].removeprefix("Value error, ").replace("'", "`")
    message = message.replace("Input should", "must").rstrip(".")
    return message[:1].lower() + message[1:]


def _either(words: list[str]) -> str:
    return " or ".join(words) if len(words) < 3 else f"{', '.join(words[:-1])} or {words[-1]}"


def show(value: Any) -> str:
    """Name a value in a message: scalars as typed, short."""
    if isinstance(value, (dict, BaseModel)):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 1000:
        return "a number of hundreds of digits"
    text = str(value)
    return f"`{text if len(text) <= 40 else text[:37] + '...'}`"


def _unknown(model: type[BaseModel], keys: Keys, *, suggest: bool) -> str:
    key, models = str(keys[-1]), list(_models(model, keys[:-1]))
    for cls in models:
        reason = getattr(cls, "refused_keys", {}).get(key)
        if reason:
            return reason
    names = [name for cls in models for name in cls.model_fields]
    hint = did_you_mean(key, names) if suggest else None
    return f"unknown key {quote(key)}" + (f"; {hint}" if hint else "")


def _models(annotation: Any, keys: Keys) -> Iterator[type[BaseModel]]:
    """Walk down annotations along the keys to the models that may stand there."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not keys:
            yield annotation
        elif keys[0] in annotation.model_fields:
            yield from _models(annotation.model_fields[keys[0]].annotation, keys[1:])
        return
    members = get_args(annotation)
    if get_origin(annotation) is Annotated:
        yield from _models(members[0], keys)
    elif get_origin(annotation) in (list, tuple, dict):
        inside = members[-1] if get_origin(annotation) is dict else members[0]
        if keys:
            yield from _models(inside, keys[1:])
        yield from _models(inside, keys)  # one item may stand for a list of one
    else:
        for member in members:
            yield from _models(member, keys)
