"""YAML texts as trees that remember where each value stands.

Refused: tags, merge keys, keys that are not text, a key given twice, numbers that are not finite,
more than one document, and aliases that stand for many values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from kvtool.documents.problems import DocumentError, Keys, Mark, Problem
from kvtool.documents.scalars import join_surrogates, read_plain
from kvtool.documents.tree import DEEPEST, Node

_MOST_NODES = 100_000
_MOST_ALIASED = 1_000  # values that aliases add, those of aliases inside them included


def parse_yaml(text: str, name: str) -> Node:
    """Read one YAML document.

    Raises:
        DocumentError: not YAML, or YAML that is refused.
    """
    try:
        loader = _Loader(text, name)
        top = loader.compose_single()
        loader.check_aliases(top)
        node = loader.build(top, ())
    except yaml.MarkedYAMLError as error:
        at = (error.problem_mark or error.context_mark).index
        raise DocumentError([Problem(Mark(name, text, at), (), _explain(error))]) from None
    except ReaderError as error:
        message = f"the character {chr(error.character)!r} has no place in YAML"
        raise DocumentError([Problem(Mark(name, text, error.position), (), message)]) from None
    if loader.problems:
        raise DocumentError(sorted(loader.problems, key=lambda problem: problem.mark.index))
    return node


def _explain(error: yaml.MarkedYAMLError) -> str:
    advice = "; indent with spaces, not with tabs" if "'\\t'" in str(error.problem) else ""
    context = f" {error.context}" if error.context else ""
    return f"not valid YAML:{context} {error.problem}".replace("'", "`") + advice


class _Loader(Reader, Scanner, Parser, Composer, BaseResolver):
    """PyYAML up to its nodes; scalars and checks are ours."""

    def __init__(self, text: str, name: str) -> None:
        self.source, self.label = text, name
        self.problems: list[Problem] = []
        self.depth = self.count = 0
        self.aliases: list[int] = []  # where they stand
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)

    def problem(self, index: int, keys: Keys, message: str) -> Problem:
        return Problem(Mark(self.label, self.source, index), keys, message)

    def compose_single(self) -> yaml.Node:
        self.get_event()
        if self.check_event(yaml.StreamEndEvent):
            return yaml.ScalarNode("", "", yaml.Mark(None, 0, 0, 0, None, None))
        top = self.compose_document()
        if not self.check_event(yaml.StreamEndEvent):
            index = self.peek_event().start_mark.index
            message = "a second document begins here; a file holds one"
            raise DocumentError([self.problem(index, (), message)])
        return top

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event = self.peek_event()
        tag = getattr(event, "tag", None)
        if tag is not None:
            self.problems.append(
                self.problem(event.start_mark.index, (), f"tags are not read, got `{tag}`")
            )
        if isinstance(event, yaml.AliasEvent):
            self.aliases.append(event.start_mark.index)
        self.depth += 1
        self._check_depth(self.depth, event.start_mark.index, ())
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def check_aliases(self, top: yaml.Node) -> None:
        """Refuse aliases that add many values, before any of them is followed twice."""
        sizes: dict[int, int] = {}  # of values, by node, written out; 0 while it is counted
        places, added = iter(self.aliases), 0

        def size(node: yaml.Node) -> int:
            nonlocal added
            known = sizes.get(id(node))
            if known is None:
                sizes[id(node)] = 0
                inside = node.value if isinstance(node, yaml.CollectionNode) else []
                pairs = (pair if isinstance(pair, tuple) else (pair,) for pair in inside)
                sizes[id(node)] = 1 + sum(size(each) for pair in pairs for each in pair)
                return sizes[id(node)]
            at = next(places)
            if known == 0:
                raise DocumentError([self.problem(at, (), "an alias inside what it stands for")])
            added += known
            if added > _MOST_ALIASED:
                message = f"aliases stand for more than {_MOST_ALIASED} values; write them out"
                raise DocumentError([self.problem(at, (), message)])
            return known

        size(top)

    def _check_depth(self, depth: int, index: int, keys: Keys) -> None:
        if depth > DEEPEST:
            message = f"nested more than {DEEPEST} levels deep"
            raise DocumentError([self.problem(index, keys[:3], message)])

    def build(self, node: yaml.Node, keys: Keys) -> Node:
        at = node.start_mark.index
        self.count += 1
        self._check_depth(len(keys), at, keys)
        if self.count > _MOST_NODES:
            message = f"more than {_MOST_NODES} values"
            raise DocumentError([self.problem(at, keys[:3], message)])
        if isinstance(node, yaml.MappingNode):
            value: Any = self._mapping(node, keys)
        elif isinstance(node, yaml.SequenceNode):
            value = [self.build(item, (*keys, i)) for i, item in enumerate(node.value)]
        else:
            value = self._scalar(node, keys)
        return Node(value, Mark(self.label, self.source, at))

    def _mapping(self, node: yaml.MappingNode, keys: Keys) -> dict[str, Node]:
        children: dict[str, Node] = {}
        for key_node, value_node in node.value:
            at = key_node.start_mark.index
            key = self._scalar(key_node, keys) if isinstance(key_node, yaml.ScalarNode) else None
            message = None
            if not isinstance(key, str):
                shown = f", got `{key_node.value}`; quote it" if key is not None else ""
                message = f"a key must be text{shown}"
            elif key == "<<" and key_node.style is None:
                message = "merge keys (`<<`) are not read; write the keys out"
            elif key in children:
                message = f"key `{key}` is given twice, first in line {children[key].key.line}"
            if message:
                self.problems.append(self.problem(at, keys, message))
                continue
            child = self.build(value_node, (*keys, key))
            children[key] = replace(child, key=Mark(self.label, self.source, at))
        return children

    def _scalar(self, node: yaml.ScalarNode, keys: Keys) -> Any:
        try:
            return read_plain(node.value) if node.style is None else join_surrogates(node.value)
        except ValueError as error:
            self.problems.append(self.problem(node.start_mark.index, keys, str(error)))
            return None
