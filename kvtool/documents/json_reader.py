"""JSON texts as trees that remember where each value stands."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from kvtool.documents.problems import DocumentError, Keys, Mark, Problem
from kvtool.documents.scalars import join_surrogates, read_finite, read_integer
from kvtool.documents.tree import DEEPEST, Node

_TOO_DEEP = f"nested more than {DEEPEST} levels deep"
_SPACE = re.compile(r"[ \t\r\n]*")


def parse_json(text: str, name: str) -> Node:
    """Read one JSON document.

    Raises:
        DocumentError: not JSON, or JSON that is refused.
    """
    reader = _Json(text, name)
    try:
        node, end = reader.value(reader.space(0), ())
        if reader.space(end) < len(text):
            raise reader.wrong(reader.space(end), "text after the end of the document")
    except json.JSONDecodeError as error:
        message = error.msg[:1].lower() + error.msg[1:].removesuffix(" at")
        raise reader.wrong(error.pos, message) from None
    if reader.problems:
        raise DocumentError(reader.problems)
    return node


def load_json(data: bytes | str) -> Any:
    """Read JSON whose numbers are finite and whose texts are whole.

    Raises:
        ValueError: anything else, and what is nested too deep.
    """
    try:
        value = json.loads(
            data,
            parse_int=read_integer,
            parse_float=lambda text: read_finite(text, text),
            parse_constant=lambda text: read_finite(text, text),
        )
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [value]
    for _ in range(DEEPEST):
        inside = [list(each.values()) if isinstance(each, dict) else each for each in level]
        level = [item for part in inside if isinstance(part, list) for item in part]
    if level:
        raise ValueError(_TOO_DEEP)
    if (b"\\ud" if isinstance(data, bytes) else "\\ud") in data.lower():
        join_surrogates(json.dumps(value, ensure_ascii=False))
    return value


class _Json:
    """Scalars by the json module, braces and brackets by hand, to know where each value stands."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        self.problems: list[Problem] = []
        self.decode = json.JSONDecoder(
            parse_int=read_integer,
            parse_float=lambda text: read_finite(text, text),
            parse_constant=lambda text: read_finite(text, text),
        ).raw_decode

    def mark(self, at: int) -> Mark:
        return Mark(self.name, self.text, at)

    def wrong(self, at: int, message: str) -> DocumentError:
        problem = Problem(self.mark(at), (), f"not valid JSON: {message}")
        return DocumentError([problem], hint="text that begins with { or [ is read as JSON")

    def space(self, at: int) -> int:
        return _SPACE.match(self.text, at).end()

    def value(self, at: int, keys: Keys) -> tuple[Node, int]:
        if len(keys) > DEEPEST:
            message = f"nested more than {DEEPEST} levels deep"
            raise DocumentError([Problem(self.mark(at), keys[:3], message)])
        read = {"{": self._object, "[": self._array}.get(self.text[at : at + 1], self._scalar)
        value, end = read(at, keys)
        return Node(value, self.mark(at)), end

    def _scalar(self, at: int, keys: Keys) -> tuple[Any, int]:
        try:
            value, end = self.decode(self.text, at)
            return (join_surrogates(value) if isinstance(value, str) else value), end
        except json.JSONDecodeError:
            raise
        except ValueError as error:
            raise DocumentError([Problem(self.mark(at), keys, str(error))]) from None

    def _array(self, at: int, keys: Keys) -> tuple[list[Node], int]:
        items: list[Node] = []
        at = self.space(at + 1)
        while not self.text.startswith("]", at):
            at = self._next(at, "]") if items else at
            node, end = self.value(at, (*keys, len(items)))
            items.append(node)
            at = self.space(end)
        return items, at + 1

    def _object(self, at: int, keys: Keys) -> tuple[dict[str, Node], int]:
        children: dict[str, Node] = {}
        first, at = True, self.space(at + 1)
        while not self.text.startswith("}", at):
            at = at if first else self._next(at, "}")
            first = False
            if not self.text.startswith('"', at):
                raise self.wrong(at, "a key in double quotes is expected")
            key, end = self._scalar(at, keys)
            if not self.text.startswith(":", self.space(end)):
                raise self.wrong(self.space(end), "`:` is expected")
            node, end = self.value(self.space(self.space(end) + 1), (*keys, key))
            if key in children:
                message = f"key `{key}` is given twice, first in line {children[key].key.line}"
                self.problems.append(Problem(self.mark(at), keys, message))
            children.setdefault(key, replace(node, key=self.mark(at)))
            at = self.space(end)
        return children, at + 1

    def _next(self, at: int, closing: str) -> int:
        if not self.text.startswith(",", at):
            raise self.wrong(at, f"`,` or `{closing}` is expected")
        return self.space(at + 1)
