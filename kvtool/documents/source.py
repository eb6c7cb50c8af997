"""Read documents with the place of each value, and report what is wrong at its place."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvtool.documents.files import expand, read_bytes, read_stdin
from kvtool.documents.readers import parse_json, parse_yaml
from kvtool.documents.tree import DocumentError, Keys, Mark, Node, Problem
from kvtool.errors import UsageError, clip, did_you_mean, quote

_SUGGESTIONS = 100  # mistakes for which near names are looked for, which takes long
_WAY = 100  # characters of the way to a value that a message repeats
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
            continue  # the message of a better fitting member of the union is shown
        suggest = len(problems) < _SUGGESTIONS
        message = _unknown(model, keys, suggest=suggest) if unknown else _message(group)
        mark = _mark(node, keys, key=unknown or group[0]["type"] == "missing")
        problems.append(Problem(mark, (*at, *keys), message))
    return sorted(problems, key=lambda problem: (problem.mark.name, problem.mark.index or 0))


def first_mistake(error: ValidationError) -> str:
    """Say what is wrong with a single value, such as that of a flag."""
    first, *more = error.errors(include_url=False)
    return _message([first, *(each for each in more if each["input"] is first["input"])])


def reason(error: ValueError) -> str:
    """Say in one line what is wrong with data of no document: the first mistake."""
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
    """Say what is wrong with one value; alternatives of a union are named together."""
    first = group[0]
    expected = list(dict.fromkeys(filter(None, map(_expected, group))))
    if len(expected) == len({_sentence(details) for details in group}):
        return f"must be {_either(expected)}, got {show(first['input'])}"
    return next(_sentence(details) for details in group if _expected(details) is None)


def _expected(details: ErrorDetails) -> str | None:
    """Say in a noun what would be right."""
    kind, context = details["type"], details.get("ctx", {})
    if kind == "literal_error":
        return context["expected"].replace("'", "`")
    if kind in _BOUNDS:
        word, bound = _BOUNDS[kind]
        return f"{word} {context[bound]}"
    return _NOUNS.get(kind)


def _sentence(details: ErrorDetails) -> str:
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
    """Walk down annotations along the keys to the models that may be there."""
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
        yield from _models(inside, keys)  # one item is read as a list of one
    else:
        for member in members:
            yield from _models(member, keys)


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
        """Return a problem at a value, or at its key; what is missing is reported at its parent."""
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
