"""Read YAML and JSON as trees whose values know their places.

YAML refuses: tags, merge keys, keys that are not text, a key given twice, numbers that are not
finite, more than one document, and aliases that stand for many values.

The json module reads JSON; places are looked up when something is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NoReturn

import yaml
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.scanner import Scanner, ScannerError

from kvtool.documents.scalars import join_surrogates, read_finite, read_integer, read_plain
from kvtool.documents.tree import DEEPEST, DocumentError, Keys, Mark, Node, Problem
from kvtool.errors import quote

_MOST_NODES = 100_000
_MOST_ALIASED = 1_000  # values that aliases add, those of aliases inside them included
_SHORT = 2**17  # characters that the slow parser may be given
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # which JSON may spell out, and libyaml refuses
_WORDS = (  # what libyaml and PyYAML's own parser say differently
    (re.compile(r"did not find (?:the )?expected"), "expected"),
    (re.compile(r"expected the node content"), "expected node content"),
    (re.compile(r"(expected .*), but (?:got|found) .*", re.DOTALL), r"\1"),
    (re.compile(r"(character|handle) '.*?'", re.DOTALL), r"\1"),
    (re.compile(r"'(<.*?>)'"), r"\1"),
    (re.compile(r" \(version .*"), ""),
    (re.compile(r"in this context$"), "here"),
)


def parse_yaml(text: str, name: str) -> Node:
    """Read one YAML document.

    Raises:
        DocumentError: not YAML, or YAML that is refused.
    """
    odd = Reader.NON_PRINTABLE.search(text)
    if odd:
        message = f"the character {odd[0]!r} has no place in YAML"
        raise DocumentError([Problem(Mark(name, text, odd.start()), (), message)])
    try:
        return _compose(text, name, _PARSER)
    except yaml.MarkedYAMLError as error:
        refusal = _refusal(text, name, error)
    if len(text) <= _SHORT and _SURROGATE.search(text):
        try:
            return _compose(text, name, _PythonParser)
        except yaml.MarkedYAMLError as error:
            refusal = _refusal(text, name, error)
    raise refusal


def _compose(text: str, name: str, parser: type) -> Node:
    composer = _Composer(text, name, parser)
    node = composer.document()
    if composer.problems:
        raise DocumentError(sorted(composer.problems, key=lambda problem: problem.mark.index or 0))
    return node


def _refusal(text: str, name: str, error: yaml.MarkedYAMLError) -> DocumentError:
    mark = error.problem_mark or error.context_mark
    at = mark.index if mark else 0
    message = f"not valid YAML: {_explain(error, text[at : at + 1])}"
    return DocumentError([Problem(Mark(name, text, at), (), message)])


def _explain(error: yaml.MarkedYAMLError, found: str) -> str:
    message = " ".join(part for part in (error.context, error.problem) if part)
    for theirs, ours in _WORDS:
        message = theirs.sub(ours, message)
    advice = "; indent with spaces, not with tabs" if found == "\t" else ""
    return message.replace("'", "`") + advice


class _PythonParser(Reader, Scanner, Parser):
    """PyYAML's own parser, some 50 times slower than libyaml's."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)

    def get_event(self) -> yaml.Event:
        try:
            return super().get_event()
        except (ValueError, OverflowError):
            problem = "found invalid Unicode character escape code"
            context = "while parsing a quoted scalar"
            raise ScannerError(context, None, problem, self.get_mark()) from None


_PARSER: type = yaml.CLoader if yaml.__with_libyaml__ else _PythonParser
_Event = yaml.ScalarEvent | yaml.CollectionStartEvent | yaml.AliasEvent


def _place(event: yaml.Event) -> int:
    return event.start_mark.index if event.start_mark else 0


class _Composer:
    """Builds the tree from events, which neither parser nests, so that depth is counted here."""

    def __init__(self, text: str, name: str, parser: type) -> None:
        self.text, self.name = text, name
        self.next = parser(text).get_event
        self.problems: list[Problem] = []
        self.count = self.aliased = 0
        self.anchors: dict[str, tuple[Node, int]] = {}  # with the number of values, written out
        self.open: set[str] = set()  # anchors of what is being read

    def mark(self, at: int) -> Mark:
        return Mark(self.name, self.text, at)

    def wrong(self, at: int, message: str) -> DocumentError:
        return DocumentError([Problem(self.mark(at), (), message)])

    def document(self) -> Node:
        """Return the top of the only document; nothing at all is null."""
        self.next()
        if isinstance(self.next(), yaml.StreamEndEvent):
            return Node(None, self.mark(0))
        top = self.value(self.next(), ())
        self.next()
        end = self.next()
        if not isinstance(end, yaml.StreamEndEvent):
            message = "a second document begins here; a file holds one"
            raise self.wrong(_place(end), message)
        return top

    def value(self, event: _Event, keys: Keys, deep: int = 1) -> Node:
        """Read a value whose first event is at hand.

        Args:
            deep: levels of mappings and lists around it, and one.
        """
        at = _place(event)
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event.anchor or "", at, deep)
        before = self.count
        self.add(1, at)
        if deep > DEEPEST:
            raise self.wrong(at, f"nested more than {DEEPEST} levels deep")
        if event.tag is not None:
            self.problems.append(
                Problem(self.mark(at), (), f"tags are not read, got `{event.tag}`")
            )
        if event.anchor is None:
            return self.content(event, keys, deep)
        if event.anchor in self.anchors or event.anchor in self.open:
            raise self.wrong(at, f"not valid YAML: found duplicate anchor `{event.anchor}`")
        self.open.add(event.anchor)
        node = self.content(event, keys, deep)
        self.open.remove(event.anchor)
        self.anchors[event.anchor] = node, self.count - before
        return node

    def content(self, event: _Event, keys: Keys, deep: int) -> Node:
        if isinstance(event, yaml.ScalarEvent):
            value = self.scalar(event, keys)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self.sequence(keys, deep)
        else:
            value = self.mapping(keys, deep)
        return Node(value, self.mark(_place(event)))

    def add(self, count: int, at: int) -> None:
        self.count += count
        if self.count > _MOST_NODES:
            raise self.wrong(at, f"more than {_MOST_NODES} values")

    def alias(self, anchor: str, at: int, deep: int) -> Node:
        """Return the value that an alias names, unless it is large."""
        if anchor in self.open:
            raise self.wrong(at, "an alias inside what it stands for")
        if anchor not in self.anchors:
            raise self.wrong(at, f"not valid YAML: found undefined alias `{anchor}`")
        node, size = self.anchors[anchor]
        self.aliased += size
        if self.aliased > _MOST_ALIASED:
            message = f"aliases stand for more than {_MOST_ALIASED} values; write them out"
            raise self.wrong(at, message)
        self.add(size, at)
        if deep + node.depth > DEEPEST:
            raise self.wrong(at, f"nested more than {DEEPEST} levels deep")
        return node

    def sequence(self, keys: Keys, deep: int) -> list[Node]:
        items: list[Node] = []
        while not isinstance(event := self.next(), yaml.SequenceEndEvent):
            items.append(self.value(event, (*keys, len(items)), deep + 1))
        return items

    def mapping(self, keys: Keys, deep: int) -> dict[str, Node]:
        children: dict[str, Node] = {}
        places: dict[str, Mark] = {}
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
                message = f"key `{key}` is given twice, first in line {places[key].line}"
            inner = (*keys, key) if isinstance(key, str) else keys
            value = self.value(self.next(), inner, deep + 1)
            if message:
                self.problems.append(Problem(self.mark(at), keys, message))
            else:
                places[key] = self.mark(at)
                children[key] = replace(value, key=places[key])
        return children

    def scalar(self, event: yaml.ScalarEvent, keys: Keys) -> Any:
        try:
            return join_surrogates(event.value) if event.style else read_plain(event.value)
        except ValueError as error:
            self.problems.append(Problem(self.mark(_place(event)), keys, str(error)))
            return None


_TOO_DEEP = f"nested more than {DEEPEST} levels deep"
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
        first: where the same key is before, None if it does not.
        token: the scalar, or the brace or bracket that opens it.
    """

    keys: Keys
    at: int
    key: int | None
    first: int | None
    token: str


class _Document:
    """A text and, on demand, the places of its values."""

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
        """Report keys that are given twice, half surrogate pairs, numbers that are none, and depth.

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
        """Say why a text whose syntax is right cannot be read."""
        self.check()
        raise DocumentError([self._problem(0, (), _TOO_DEEP)])

    def refuse_syntax(self, error: json.JSONDecodeError) -> NoReturn:
        """Report a mistake of syntax, unless what comes before it is nested too deep."""
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
        plain = error.msg[:1].lower() + error.msg[1:].removesuffix(" at")
        message = _MESSAGES.get(error.msg, plain)
        if error.msg == "Expecting ',' delimiter":
            message = f"`,` or `{'}' if opened[-1:] == ['{'] else ']'}` is expected"
        hint = "text that begins with { or [ is read as JSON"
        raise DocumentError([self._problem(at, (), f"not valid JSON: {message}")], hint=hint)

    def _problem(self, at: int, keys: Keys, message: str) -> Problem:
        return Problem(Mark(self.name, self.text, at), keys, message)
