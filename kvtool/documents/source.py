"""Documents as they were typed: their values, where each stands, and what is wrong with them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvtool.documents.json_reader import parse_json
from kvtool.documents.problems import DocumentError, Keys, Mark, Problem
from kvtool.documents.reading import expand, read_bytes, read_stdin
from kvtool.documents.tree import Node
from kvtool.documents.validation import find_problems, show
from kvtool.documents.yaml_reader import parse_yaml
from kvtool.errors import UsageError, did_you_mean

SCHEMA_VERSION = 1
_LARGEST = 4 * 2**20  # bytes of a file
_RECIPE_KEYS = {"policy", "policies", "budget", "eval", "modifiers", "generation"}

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Source:
    """A document before it is validated.

    Attributes:
        name: the file as typed, `<stdin>`, or `command line` where there is no file.
        node: the values and their places.
        path: the file, None where there is none.
    """

    name: str
    node: Node
    path: Path | None = None

    @classmethod
    def parse(cls, text: str, name: str, path: Path | None = None) -> Source:
        """Read JSON if the text begins with `{` or `[`, else YAML.

        Raises:
            DocumentError: a syntax error, or something that is refused, with its position.
            UsageError: the text is empty.
        """
        read = parse_json if text.lstrip()[:1] in ("{", "[") else parse_yaml
        node = read(text, name)
        if node.value is None:
            raise UsageError(f"`{name}` is empty")
        return cls(name, node, path)

    @classmethod
    def empty(cls, kind: str = "recipe") -> Source:
        """Return a document without settings, for a command line that names no file."""
        name = "command line"
        return cls(name, Node.of({"kind": kind, "schema_version": SCHEMA_VERSION}, Mark(name)))

    @property
    def data(self) -> Any:
        """Plain dictionaries, lists and scalars."""
        return self.node.data

    @property
    def kind(self) -> Any:
        """What the document says it is; None if it does not say."""
        kind = self.node.child("kind")
        return kind.data if kind else None

    def find(self, keys: Keys) -> Node | None:
        """Return the value at the end of a way, None if there is nothing."""
        node: Node | None = self.node
        for key in keys:
            node = node.child(key) if node else None
        return node

    def problem(self, keys: Keys, message: str, *, at_key: bool = False) -> Problem:
        """Return a problem at a value, or at its key; what is missing stands at its parent."""
        node = self.node
        for key in keys:
            child = node.child(key)
            if child is None:
                break
            node = child
        return Problem(node.key if at_key and node.key else node.mark, keys, message)

    def validate(
        self,
        model: type[Model],
        at: Keys = (),
        *,
        without: Sequence[str] = (),
        given: Mapping[str, Any] | None = None,
    ) -> Model:
        """Return the part of the document at `at` as a model.

        Args:
            without: keys of that part that the model does not know.
            given: values that flags set, by key; they replace those of the document.

        Raises:
            DocumentError: every mistake, each with its place.
        """
        node = self.find(at)
        if node is None:
            raise DocumentError([self.problem(at, "is required")])
        if isinstance(node.value, dict):
            kept = {key: child for key, child in node.value.items() if key not in without}
            node = replace(node, value=kept | _from_flags(given or {}))
        try:
            return model.model_validate(node.data)
        except ValidationError as error:
            raise DocumentError(find_problems(error, model, node, at)) from None


def _from_flags(given: Mapping[str, Any]) -> dict[str, Node]:
    nodes = {}
    for key, value in given.items():
        flag = Mark(f"--{key.replace('_', '-')} {value}")
        nodes[key] = replace(Node.of(value, flag), key=flag)
    return nodes


def read_source(path: str, *, option: str) -> Source:
    """Read a document from a file, `-` for stdin.

    Args:
        option: what the path was given for, in errors.

    Raises:
        UsageError: stdin is a terminal or empty; else as `read_file`.
        DocumentError: a syntax error, or something that is refused, with its position.
    """
    if path == "-":
        return Source.parse(_decode(_read_stdin(option), "stdin"), "<stdin>")
    return read_file(expand(path), option=option)


def read_file(path: Path, *, option: str) -> Source:
    """Read a document from a file.

    Raises:
        UsageError: missing, unreadable, no regular file, empty, too large, not UTF-8.
        DocumentError: a syntax error, or something that is refused, with its position.
    """
    name = f"{option}: `{path}`"
    try:
        data = read_bytes(path, name, most=_LARGEST, kind="document")
    except UsageError:
        raise
    except FileNotFoundError:
        raise UsageError(f"{name} does not exist") from None
    except IsADirectoryError:
        raise UsageError(f"{name} is a folder, not a file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{option}: cannot read `{path}`: {reason}") from None
    return Source.parse(_decode(data, name), str(path), path)


def read_named(path: Path, *, option: str, kind: str) -> Source:
    """Read a document that another document names; one of another kind shows none of its lines.

    Raises:
        UsageError, DocumentError: as `read_file`.
    """
    try:
        source = read_file(path, option=option)
    except DocumentError as error:
        if _declares(error.problems[0].mark.text, kind):
            raise
        raise DocumentError([problem.without_line() for problem in error.problems]) from None
    if source.kind != kind:
        source = replace(source, node=source.node.without_lines())
    return source


def _declares(text: str, kind: str) -> bool:
    """Whether a text that cannot be read says of what kind it is."""
    return re.search(rf"""\bkind["']?\s*:\s*["']?{kind}\b""", text) is not None


def _read_stdin(option: str) -> bytes:
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(
            f"{option}: `-` reads stdin, which is a terminal",
            hint="pipe a document into the command, or name a file",
        )
    data = read_stdin(most=_LARGEST, kind="document")
    if not data.strip():
        raise UsageError("stdin is empty (did the previous command fail?)")
    return data


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}",
            hint="convert it, for example with iconv -f LATIN1 -t UTF-8",
        ) from None


def check_kind(source: Source, *, takes: Sequence[str], command: str) -> None:
    """Refuse a document that a command does not take.

    Args:
        takes: the kinds it takes.
        command: as typed, such as `kvtool eval`.

    Raises:
        DocumentError: not a mapping, another kind or none, made by a newer kvtool.
    """
    wanted = f"{command} takes kind {' or '.join(f'`{kind}`' for kind in takes)}"
    if not isinstance(source.node.value, dict):
        raise DocumentError([source.problem((), f"{wanted}, got {show(source.data)}")])
    if source.node.child("kind") is None:
        looks_so = "recipe" in takes and _RECIPE_KEYS & source.node.value.keys()
        hint: str | None = f"add the line `kind: {'recipe' if looks_so else takes[0]}`"
        raise DocumentError([source.problem((), f"`kind` is missing; {wanted}")], hint=hint)
    if source.kind not in takes:
        hint = did_you_mean(str(source.kind), takes) or _next_step(source, takes)
        problem = source.problem(("kind",), f"{wanted}, got {show(source.kind)}")
        raise DocumentError([problem], hint=hint)
    check_version(source)


def check_version(source: Source) -> None:
    """Refuse a document of a schema that this kvtool does not know.

    Raises:
        DocumentError: `schema_version` is not 1.
    """
    node = source.node.child("schema_version")
    version = node.data if node else SCHEMA_VERSION
    if type(version) is int and version > SCHEMA_VERSION:
        message = f"{version} was made by a newer kvtool; this one reads {SCHEMA_VERSION}"
        problem = source.problem(("schema_version",), message)
        raise DocumentError([problem], hint="upgrade kvtool")
    if type(version) is not int or version != SCHEMA_VERSION:
        message = f"must be {SCHEMA_VERSION}, got {show(version)}"
        raise DocumentError([source.problem(("schema_version",), message)])


def _next_step(source: Source, takes: Sequence[str]) -> str | None:
    if source.kind == "profile" and "plan" in takes:
        return f"kvtool plan-budget {'-' if source.name == '<stdin>' else source.name}"
    return None
