"""JSON texts as trees; where a value stands is looked up when something is wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NoReturn

from kvtool.documents.problems import DocumentError, Keys, Mark, Problem
from kvtool.documents.scalars import join_surrogates, read_finite, read_integer
from kvtool.documents.tree import DEEPEST, Node
from kvtool.errors import quote

_TOO_DEEP = f"nested more than {DEEPEST} levels deep"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[][{},:]|[^][{},:"\s]+', re.DOTALL)
_MESSAGES = {  # of the json module, in our words
    "Expecting property name enclosed in double quotes": "a key in double quotes is expected",
    "Illegal trailing comma before end of object": "a key in double quotes is expected",
    "Illegal trailing comma before end of array": "expecting value",
    "Expecting ':' delimiter": "`:` is expected",
    "Extra data": "text after the end of the document",
}


def _number(text: str) -> float:
    return read_finite(text, text)


_NUMBERS: dict[str, Any] = {
    "parse_int": read_integer,
    "parse_float": _number,
    "parse_constant": _number,
}


def parse_json(text: str, name: str) -> Node:
    """Read one JSON document.

    Raises:
        DocumentError: not JSON, or JSON that is refused.
    """
    document = _Document(text, name)
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice.append("keys")
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique, **_NUMBERS)
    except json.JSONDecodeError as error:
        document.refuse_syntax(error)
    except (ValueError, RecursionError):
        document.refuse()
    if twice or _SURROGATE.search(text):
        document.check()
    return document.node(value, ())


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {quote(key)} is given twice")
        found[key] = value
    return found


def load_json(data: bytes | str, *, unique: bool = False) -> Any:
    """Read JSON whose numbers are finite and whose texts are whole.

    Args:
        unique: whether a key that is given twice is refused.

    Raises:
        ValueError: anything else, and what is nested too deep.
    """
    try:
        value = json.loads(data, object_pairs_hook=_unique if unique else None, **_NUMBERS)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [value]
    for _ in range(DEEPEST):
        inside = [list(each.values()) if isinstance(each, dict) else each for each in level]
        level = [item for part in inside if isinstance(part, list) for item in part]
    if level:
        raise ValueError(_TOO_DEEP)
    if b"\\ud" in data.lower() if isinstance(data, bytes) else "\\ud" in data.lower():
        join_surrogates(json.dumps(value, ensure_ascii=False))
    return value


@dataclass(frozen=True)
class _Found:
    """A value in a text.

    Attributes:
        keys: the way to it.
        at: where it begins.
        key: where its key begins, None in lists and at the top.
        first: where the same key stands before, None if it does not.
        token: the scalar, or the brace or bracket that opens it.
    """

    keys: Keys
    at: int
    key: int | None
    first: int | None
    token: str


class _Document:
    """A text and, once somebody asks, the places of its values."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name

    def node(self, value: Any, keys: Keys) -> Node:
        """Return the tree of what the json module has read."""
        if len(keys) > DEEPEST:
            self.refuse()
        content = value
        if isinstance(value, dict):
            content = {key: self.node(child, (*keys, key)) for key, child in value.items()}
        elif isinstance(value, list):
            content = [self.node(child, (*keys, i)) for i, child in enumerate(value)]
        key = None
        if keys and isinstance(keys[-1], str):
            key = Mark(self.name, self.text, partial(self._place, keys, True))
        return Node(content, Mark(self.name, self.text, partial(self._place, keys, False)), key)

    def _place(self, keys: Keys, of_key: bool) -> int:
        found = self._places[keys]
        return found.key if of_key and found.key is not None else found.at

    @cached_property
    def _places(self) -> dict[Keys, _Found]:
        return {found.keys: found for found in self._values()}

    def _values(self) -> Iterator[_Found]:
        """Walk a text that is JSON, or the part of it that is; what holds others comes first."""
        way: list[str | int] = []  # to the value that comes next
        objects: list[dict[str, int] | None] = []  # open ones, places of their keys; None: a list
        key = first = None
        for found in _TOKEN.finditer(self.text):
            token, at = found[0], found.start()
            around = objects[-1] if objects else None
            if token in "}]":
                if objects:
                    objects.pop()
                    way.pop()
            elif token == ",":
                key = None
                if objects and around is None:
                    way[-1] = int(way[-1]) + 1
            elif around is not None and key is None and token[0] == '"':
                way[-1], key = json.loads(token, strict=False), at
                first = around.get(str(way[-1]))
                around.setdefault(str(way[-1]), at)
            elif token != ":":
                yield _Found(tuple(way), at, key, first, token)
                if token in "{[":
                    objects.append({} if token == "{" else None)
                    way.append(0)
                key = first = None

    def check(self) -> None:
        """Tell keys that are given twice, half surrogate pairs, numbers that are none, and depth.

        Raises:
            DocumentError: there are any; nothing is read behind a scalar that cannot be.
        """
        problems: list[Problem] = []
        for found in self._values():
            keys = found.keys
            if len(keys) > DEEPEST:
                raise DocumentError([self._problem(found.at, keys[:3], _TOO_DEEP)])
            if found.first is not None and found.key is not None:
                line = Mark(self.name, self.text, found.first).line
                message = f"key `{keys[-1]}` is given twice, first in line {line}"
                problems.append(self._problem(found.key, keys[:-1], message))
            try:
                if found.key is not None:
                    join_surrogates(str(keys[-1]))
                if found.token not in "{[":
                    value = json.loads(found.token, **_NUMBERS)
                    if isinstance(value, str):
                        join_surrogates(value)
            except ValueError as error:
                problems.append(self._problem(found.at, keys, str(error)))
                break
        if problems:
            raise DocumentError(problems)

    def refuse(self) -> NoReturn:
        """Tell why a text whose syntax is right cannot be read."""
        self.check()
        raise DocumentError([self._problem(0, (), _TOO_DEEP)])

    def refuse_syntax(self, error: json.JSONDecodeError) -> NoReturn:
        """Tell a mistake of syntax, unless what comes before it is nested too deep."""
        at = error.pos
        if error.msg.startswith("Illegal trailing comma"):  # Python 3.13 points at the comma
            at += 1 + len(self.text[at + 1 :]) - len(self.text[at + 1 :].lstrip(" \t\r\n"))
        opened: list[str] = []
        for found in _TOKEN.finditer(self.text):
            if found.start() >= at:
                break
            if found[0] in "{[":
                opened.append(found[0])
            elif found[0] in "}]" and opened:
                opened.pop()
            if len(opened) > DEEPEST + 1:
                self.check()
        told = _MESSAGES.get(error.msg, error.msg[:1].lower() + error.msg[1:].removesuffix(" at"))
        if error.msg == "Expecting ',' delimiter":
            told = f"`,` or `{'}' if opened[-1:] == ['{'] else ']'}` is expected"
        hint = "text that begins with { or [ is read as JSON"
        raise DocumentError([self._problem(at, (), f"not valid JSON: {told}")], hint=hint)

    def _problem(self, at: int, keys: Keys, message: str) -> Problem:
        return Problem(Mark(self.name, self.text, at), keys, message)
