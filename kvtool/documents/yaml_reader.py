"""YAML texts as trees that remember where each value stands.

Refused: tags, merge keys, keys that are not text, a key given twice, numbers that are not finite,
more than one document, and aliases that stand for many values.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import yaml
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.scanner import Scanner, ScannerError

from kvtool.documents.problems import DocumentError, Keys, Mark, Problem
from kvtool.documents.scalars import join_surrogates, read_plain
from kvtool.documents.tree import DEEPEST, Node

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
        """Return what an alias stands for, once it is known that this is not much."""
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
