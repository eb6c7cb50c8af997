"""Read YAML and JSON as trees whose values know their places.

YAML has the scalars of the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2, 10.3): `on`,
`3:1`, `010` and dates are not what YAML 1.1 made of them, and `1e-5` is a number. Refused are tags,
merge keys, keys that are not text, keys given twice, numbers that are not finite, more than one
document, and aliases that stand for many values.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NoReturn

import yaml
from yaml.reader import Reader

from kvtool.documents.tree import DEEPEST, DocumentError, Keys, Mark, Node, Problem
from kvtool.errors import quote

_MOST_NODES = 100_000
_MOST_ALIASED = 1_000  # values that aliases add, those of aliases inside them included
_SHORT = 2**17  # characters that PyYAML's own parser, 50 times slower, may be given
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # which JSON may spell out, and libyaml refuses
_TOO_DEEP = f"nested more than {DEEPEST} levels deep"
_PARSER: type = yaml.CLoader if yaml.__with_libyaml__ else yaml.Loader

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


def parse_yaml(text: str, name: str) -> Node:
    """Read one YAML document; `DocumentError` where it is none, or is refused."""
    odd = Reader.NON_PRINTABLE.search(text)
    if odd:
        message = f"the character {odd[0]!r} has no place in YAML"
        raise DocumentError([Problem(Mark(name, text, odd.start()), (), message)])
    slow = len(text) <= _SHORT and _SURROGATE.search(text)
    try:
        parser = yaml.Loader if slow else _PARSER
        return _Composer(text, name, parser(str(text))).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = mark.index if mark else 0
        said = " ".join(part for part in (error.context, error.problem) if part)
        advice = "; indent with spaces, not with tabs" if text[at : at + 1] == "\t" else ""
        message = f"not valid YAML: {said}{advice}".replace("'", "`")
    except DocumentError:
        raise
    except (ValueError, OverflowError):  # of PyYAML's own parser: no character has such a number
        at, message = 0, "not valid YAML: invalid Unicode character escape code"
    raise DocumentError([Problem(Mark(name, text, at), (), message)])


_Event = yaml.ScalarEvent | yaml.CollectionStartEvent | yaml.AliasEvent


def _place(event: yaml.Event) -> int:
    return event.start_mark.index if event.start_mark else 0


class _Composer:
    """Builds the tree from events, which no parser nests, so that depth is counted here."""

    def __init__(self, text: str, name: str, parser: Any) -> None:
        self.text, self.name = text, name
        self.next = parser.get_event
        self.problems: list[Problem] = []
        self.count = self.aliased = 0
        self.anchors: dict[str, tuple[Node, int]] = {}  # with the number of values, written out
        self.open: set[str] = set()  # anchors of what is being read

    def mark(self, at: int) -> Mark:
        return Mark(self.name, self.text, at)

    def note(self, at: int, keys: Keys, message: str) -> None:
        self.problems.append(Problem(self.mark(at), keys, message))

    def refuse(self, at: int, message: str) -> NoReturn:
        raise DocumentError([Problem(self.mark(at), (), message)])

    def document(self) -> Node:
        """Return the top of the only document; nothing at all is null."""
        self.next()
        if isinstance(self.next(), yaml.StreamEndEvent):
            return Node(None, self.mark(0))
        top = self.value(self.next(), ())
        self.next()
        end = self.next()
        if not isinstance(end, yaml.StreamEndEvent):
            self.refuse(_place(end), "a second document begins here; a file holds one")
        if self.problems:
            raise DocumentError(sorted(self.problems, key=lambda problem: problem.mark.index or 0))
        return top

    def value(self, event: _Event, keys: Keys, deep: int = 1) -> Node:
        """Read a value whose first event is at hand, inside `deep` - 1 others."""
        at = _place(event)
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event.anchor or "", at, deep)
        before = self.count
        self.add(1, at)
        if deep > DEEPEST:
            self.refuse(at, _TOO_DEEP)
        if event.tag is not None:
            self.note(at, (), f"tags are not read, got `{event.tag}`")
        if event.anchor in self.anchors or event.anchor in self.open:
            self.refuse(at, f"not valid YAML: found duplicate anchor `{event.anchor}`")
        if event.anchor is not None:
            self.open.add(event.anchor)
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = self.scalar(event, keys)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self.sequence(keys, deep)
        else:
            value = self.mapping(keys, deep)
        node = Node(value, self.mark(at))
        if event.anchor is not None:
            self.open.remove(event.anchor)
            self.anchors[event.anchor] = node, self.count - before
        return node

    def add(self, count: int, at: int) -> None:
        self.count += count
        if self.count > _MOST_NODES:
            self.refuse(at, f"more than {_MOST_NODES} values")

    def alias(self, anchor: str, at: int, deep: int) -> Node:
        """Return the value that an alias names, unless it is large."""
        if anchor in self.open:
            self.refuse(at, "an alias inside what it stands for")
        if anchor not in self.anchors:
            self.refuse(at, f"not valid YAML: found undefined alias `{anchor}`")
        node, size = self.anchors[anchor]
        self.aliased += size
        if self.aliased > _MOST_ALIASED:
            message = f"aliases stand for more than {_MOST_ALIASED} values; write them out"
            self.refuse(at, message)
        self.add(size, at)
        if deep + node.depth > DEEPEST:
            self.refuse(at, _TOO_DEEP)
        return node

    def sequence(self, keys: Keys, deep: int) -> list[Node]:
        items: list[Node] = []
        while not isinstance(event := self.next(), yaml.SequenceEndEvent):
            items.append(self.value(event, (*keys, len(items)), deep + 1))
        return items

    def mapping(self, keys: Keys, deep: int) -> dict[str, Node]:
        children: dict[str, Node] = {}
        while not isinstance(event := self.next(), yaml.MappingEndEvent):
            at = _place(event)
            key = self.value(event, keys, deep + 1).value
            self.count -= 1  # a key is no value
            plain = isinstance(event, yaml.ScalarEvent) and not event.style
            message = None
            if not isinstance(key, str):
                shown = f", got `{event.value}`; quote it" if plain else ""
                message = f"a key must be text{shown}"
            elif key == "<<" and plain:
                message = "merge keys (`<<`) are not read; write the keys out"
            elif key in children:
                first = children[key].key or children[key].mark
                message = f"key `{key}` is given twice, first in line {first.line}"
            inner = (*keys, key) if isinstance(key, str) else keys
            value = self.value(self.next(), inner, deep + 1)
            if message:
                self.note(at, keys, message)
            else:
                children[key] = replace(value, key=self.mark(at))
        return children

    def scalar(self, event: yaml.ScalarEvent, keys: Keys) -> Any:
        try:
            return self.read(event)
        except ValueError as error:
            self.note(_place(event), keys, str(error))
            return None

    def read(self, event: yaml.ScalarEvent) -> Any:
        return join_surrogates(event.value) if event.style else read_plain(event.value)


def _finite(text: str) -> float:
    return read_finite(text, text)


_NUMBERS: dict[str, Any] = {
    "parse_int": read_integer,
    "parse_float": _finite,
    "parse_constant": _finite,
}


class _JsonComposer(_Composer):
    """Finds the places in JSON, which is YAML; scalars are read as JSON."""

    def __init__(self, text: str, name: str) -> None:
        in_a_line = re.sub(r"[\t\n\r]", " ", text)
        plain = re.sub(r"\\.|[^ -~]", lambda found: "x" * len(found[0]), in_a_line)
        super().__init__(text, name, _PARSER(plain))

    def add(self, count: int, at: int) -> None:
        """Allow as many values as a file has."""

    def read(self, event: yaml.ScalarEvent) -> Any:
        end = event.end_mark.index if event.end_mark else 0
        value = json.loads(self.text[_place(event) : end], **_NUMBERS)
        return join_surrogates(value) if isinstance(value, str) else value


def parse_json(text: str, name: str) -> Node:
    """Read one JSON document with the json module; places are looked up when something is wrong."""
    try:
        return _Places(text, name).tree(load_json(text, unique=True), ())
    except json.JSONDecodeError as error:
        message = f"not valid JSON: {error.msg[:1].lower()}{error.msg[1:]}".replace("'", "`")
        problem = Problem(Mark(name, text, error.pos), (), message)
        hint = "text that begins with { or [ is read as JSON"
        raise DocumentError([problem], hint=hint) from None
    except ValueError as error:
        with suppress(yaml.MarkedYAMLError):
            _JsonComposer(text, name).document()
        raise DocumentError([Problem(Mark(name, text, 0), (), str(error))]) from None


class _Places:
    """A JSON text and, on demand, the places of its values."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name

    def tree(self, value: Any, keys: Keys) -> Node:
        """Return the tree of what the json module has read."""
        content = value
        if isinstance(value, dict):
            content = {key: self.tree(child, (*keys, key)) for key, child in value.items()}
        elif isinstance(value, list):
            content = [self.tree(child, (*keys, i)) for i, child in enumerate(value)]
        key = None
        if keys and isinstance(keys[-1], str):
            key = Mark(self.name, self.text, partial(self._place, keys, True))
        return Node(content, Mark(self.name, self.text, partial(self._place, keys, False)), key)

    @cached_property
    def _found(self) -> Node:
        try:
            return _JsonComposer(self.text, self.name).document()
        except yaml.MarkedYAMLError:  # a key of more than 1024 characters
            return Node(None, Mark(self.name, self.text, 0))

    def _place(self, keys: Keys, of_key: bool) -> int:
        node = self._found
        for key in keys:
            node = node.child(key) or node
        mark = node.key if of_key and node.key else node.mark
        return mark.index or 0


Item = tuple[Mark, Callable[[], Any]]
"""The place of a value in a file of many, and what reads it."""


def json_array(text: str, name: str) -> Iterator[Item]:
    """Yield the items of a text that is one JSON array, or the one value that it is."""
    top = parse_json(text, name)
    for item in top.value if isinstance(top.value, list) else [top]:
        yield item.mark, partial(getattr, item, "data")


def json_lines(text: str, name: str) -> Iterator[Item]:
    """Yield the lines of a text that are not blank; only LF ends one, as JSON may hold others."""
    start = 0
    for line in text.split("\n"):
        if line.strip():
            yield Mark(name, text, start), partial(load_json, line, unique=True)
        start += len(line) + 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {quote(key)} is given twice")
        found[key] = value
    return found


def load_json(data: bytes | str, *, unique: bool = False) -> Any:
    """Read JSON whose numbers are finite and whose texts are whole; `ValueError` for anything else.

    Args:
        unique: whether a key that is given twice is refused.
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


def try_json(text: str) -> Any:
    """Return what a text is as JSON, None where it is none."""
    try:
        return load_json(text)
    except ValueError:
        return None
