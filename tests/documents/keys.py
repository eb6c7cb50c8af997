"""Every key that a document can have, and other values for each."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

Way = tuple[str, ...]
"""The keys that lead to a value; `*` stands for the entries of a list."""


def ways(annotation: Any, way: Way = ()) -> Iterator[Way]:
    """Yield the way to every value of a document of this class, by its schema alone."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from ways(field.annotation, (*way, name))
        return
    members = [each for each in get_args(annotation) if each is not type(None)]
    if get_origin(annotation) is Annotated:
        yield from ways(members[0], way)
    elif get_origin(annotation) is list:
        yield from ways(members[0], (*way, "*"))
    elif members and get_origin(annotation) not in (dict, tuple) and not _literal(annotation):
        yield from dict.fromkeys(inner for each in members for inner in ways(each, way))
    else:
        yield way


def _literal(annotation: Any) -> bool:
    return any(not isinstance(each, type) and not get_args(each) for each in get_args(annotation))


def find(data: Any, way: Way) -> Any:
    """Return the value at a way, of a list's entries the first; None where there is nothing."""
    for key in way:
        if data is None or (key == "*" and not data):
            return None
        data = data[0] if key == "*" else data.get(key)
    return data


def edited(data: Any, way: Way, value: Any) -> Any:
    """Return a document with another value at a way."""
    data = copy.deepcopy(data)
    inside = data
    for key in way[:-1]:
        inside = inside[0] if key == "*" else inside[key]
    inside[0 if way[-1] == "*" else way[-1]] = value
    return data


def others(value: Any) -> list[Any]:
    """Values of the same type that a person might put in place of one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1, value * 2]
    if isinstance(value, float):
        return [value * 0.9, value / 2]
    if isinstance(value, str):
        return [f"{value}x"]
    return []
