"""Read documents with the place of each value, and report what is wrong at its place."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvtool.documents.files import expand, read_utf8
from kvtool.documents.readers import parse_json, parse_yaml
from kvtool.documents.tree import DocumentError, Hidden, Keys, Mark, Node, Problem
from kvtool.errors import UsageError, clip, did_you_mean, quote

_SUGGESTIONS = 100  # mistakes for which near names are looked for, which takes long
_WAY = 100  # characters of the way to a value that a message repeats
_TYPES = {  # as pydantic calls them
    "boolean": "true or false",
    "dictionary": "a mapping",
    "integer": "a whole number",
    "list": "a list",
    "number": "a number",
    "string": "text",
    "tuple": "a list",
}
_BOUNDS = (
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
    ("greater than", "above"),
    ("less than", "below"),
    ("None", "null"),
)


def find_problems(
    error: ValidationError, model: type[BaseModel], node: Node, at: Keys
) -> list[Problem]:
    """Turn what pydantic found in the value at `at` into problems, in the document's order."""
    found: dict[tuple[Keys, bool], list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        keys = _keys(details, node)
        found.setdefault((keys, details["type"] == "extra_forbidden"), []).append(details)
    inner = {keys[:depth] for keys, _ in found for depth in range(len(keys))}
    problems: list[Problem] = []
    for (keys, unknown), group in found.items():
        if keys in inner and all(map(_noun, group)):
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
    way = ".".join(map(str, error.errors()[0]["loc"]))[:_WAY]
    return clip(f"{way}: {first_mistake(error)}" if way else first_mistake(error))


def problem_of(mark: Mark, error: ValueError) -> Problem:
    """Say what is wrong with a value that has a line of its own, and where."""
    if isinstance(error, json.JSONDecodeError):
        mark = replace(mark, at=(mark.index or 0) + error.pos)
        return Problem(mark, (), f"is not JSON: {error.msg.lower()}")
    return Problem(mark, (), reason(error))


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


def _mark(node: Node, keys: Keys, *, key: bool = False) -> Mark:
    """Return the mark of the last node on the way: of its key if asked for and there is one."""
    for part in keys:
        child = node.child(part)
        if child is None:
            break
        node = child
    return node.key if key and node.key is not None else node.mark


def _message(group: list[ErrorDetails]) -> str:
    """Say what is wrong with one value; alternatives of a union are named together."""
    nouns: list[str] = []
    for details in group:
        noun = _noun(details)
        if noun is None:
            return _sentence(details)
        nouns += [noun] if noun not in nouns else []
    listed = " or ".join(filter(None, [", ".join(nouns[:-1]), nouns[-1]]))
    return f"must be {listed}, got {show(group[0]['input'])}"


def _noun(details: ErrorDetails) -> str | None:
    """Say what a value must be, where pydantic has a noun for it."""
    _, said, noun = details["msg"].partition("Input should be ")
    typed = re.match(r"a valid (\w+)", noun)
    if typed:
        return _TYPES.get(typed[1], typed[0])
    for theirs, ours in _BOUNDS:
        noun = noun.replace(theirs, ours)
    return noun.replace("'", "`") if said else None


def _sentence(details: ErrorDetails) -> str:
    if details["type"] == "missing":
        return "is required"
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, ValueError):
        return str(cause)
    message = details["msg"].replace("'", "`").replace("Input should", "must").rstrip(".")
    return f"{message[:1].lower()}{message[1:]}, got {show(details['input'])}"


def show(value: Any) -> str:
    """Name a value in a message: scalars as typed, short."""
    if isinstance(value, (dict, BaseModel)):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    return f"`{text if len(text) <= 40 else text[:37] + '...'}`"


def _unknown(model: type[BaseModel], keys: Keys, *, suggest: bool) -> str:
    key = str(keys[-1])
    names = [name for cls in _models(model, keys[:-1]) for name in cls.model_fields]
    if not suggest:
        return f"unknown key {quote(key)}"
    near = get_close_matches(key[:_WAY], names, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"keys here: {', '.join(names)}"
    return f"unknown key {quote(key)}; {hint}"


def _models(annotation: Any, keys: Keys) -> Iterator[type[BaseModel]]:
    """Walk down annotations along the keys to the models that may be there."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not keys:
            yield annotation
        elif keys[0] in annotation.model_fields:
            yield from _models(annotation.model_fields[keys[0]].annotation, keys[1:])
        return
    inside = get_origin(annotation) in (list, tuple, dict)
    for member in get_args(annotation):
        if inside and keys:
            yield from _models(member, keys[1:])
        yield from _models(member, keys)  # one item is read as a list of one


SCHEMA_VERSION = 1
_LARGEST = 4 * 2**20  # bytes of a file

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
        """Read JSON if the text begins with `{` or `[`, else YAML; an empty text is refused."""
        read = parse_json if text.lstrip()[:1] in ("{", "[") else parse_yaml
        node = read(text, name)
        if node.value is None:
            raise UsageError(f"`{name}` is empty")
        return cls(name, node, path)

    @classmethod
    def empty(cls) -> Source:
        """Return a recipe without settings, for a command line that names no file."""
        name = "command line"
        return cls(name, Node.of({"kind": "recipe", "schema_version": SCHEMA_VERSION}, Mark(name)))

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

    def problem(self, keys: Keys, message: str) -> Problem:
        """Return a problem at a value; what is missing is reported at its parent."""
        return Problem(_mark(self.node, keys), keys, message)

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
            for key, value in (given or {}).items():
                flag = Mark(f"--{key.replace('_', '-')} {value}")
                kept[key] = replace(Node.of(value, flag), key=flag)
            node = replace(node, value=kept)
        try:
            return model.model_validate(node.data)
        except ValidationError as error:
            raise DocumentError(find_problems(error, model, node, at)) from None

    def take(self, model: type[Model], *, command: str) -> Model:
        """Return the whole document as a model, whose kind it must have."""
        check_kind(self, takes=(model.model_fields["kind"].default,), command=command)
        return self.validate(model)


def read_source(path: str, *, option: str) -> Source:
    """Read a document as `read_file` does, `-` from stdin; a terminal is refused."""
    if path != "-":
        return read_file(expand(path), option=option)
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(
            f"{option}: `-` reads stdin, which is a terminal",
            hint="pipe a document into the command, or name a file",
        )
    return Source.parse(read_utf8(path, "", most=_LARGEST, kind="document")[1], "<stdin>")


def read_file(path: Path, *, option: str, kind: str | None = None) -> Source:
    """Read a document from a file.

    Args:
        option: what the path was given for, in errors.
        kind: that another document says the file is; one that does not say so itself shows none of
            its lines.

    Raises:
        UsageError: missing, unreadable, no regular file, empty, too large, not UTF-8.
        DocumentError: a syntax error, or something that is refused, with its position.
    """
    text = read_utf8(path, option, most=_LARGEST, kind="document")[1]
    if kind is not None and not re.search(rf"""\bkind["']?\s*:\s*["']?{kind}\b""", text):
        text = Hidden(text)
    return Source.parse(text, str(path), path)


_SUFFIXES = (".yaml", ".yml", ".json")


def is_document(path: str | Path) -> bool:
    """Whether a path is that of a document, and not a model's folder or its name."""
    place = expand(path)
    return place.suffix.lower() in _SUFFIXES or place.is_file()


def source_of(given: Any, what: str) -> Source:
    """Return a document that is given by its data or its file; `what` begins an error."""
    if isinstance(given, Mapping):
        name = f"the {given.get('kind', 'recipe')}"
        return Source(name, Node.of(dict(given), Mark(name)))
    if isinstance(given, (str, Path)):
        return read_source(str(given), option=what.removeprefix("a "))
    raise UsageError(f"{what} is a document, its data or its file, got {type(given).__name__}")


def read_as(given: Any, model: type[Model], what: str, *, command: str) -> Model:
    """Return a document that is given as such, by its data or by its file."""
    if isinstance(given, model):
        return given
    return source_of(given, what).take(model, command=command)


def check_kind(source: Source, *, takes: Sequence[str], command: str) -> None:
    """Refuse a document of a kind that a command (`kvtool eval`) does not take, or of none."""
    wanted = f"{command} takes kind {' or '.join(f'`{kind}`' for kind in takes)}"
    kind, got, hint = source.kind, show(source.kind), None
    if kind in takes:
        return check_version(source)
    if not isinstance(source.node.value, dict):
        got = show(source.data)
    elif kind is None:
        got, hint = "none", f"add the line `kind: {takes[0]}`"
    elif kind == "profile" and "plan" in takes:
        hint = f"kvtool plan-budget {'-' if source.name == '<stdin>' else source.name}"
    else:
        hint = did_you_mean(str(kind), takes)
    raise DocumentError([source.problem(("kind",), f"{wanted}, got {got}")], hint=hint)


def check_version(source: Source) -> None:
    """Refuse a document of a schema that this kvtool does not know."""
    node = source.node.child("schema_version")
    version = node.data if node else SCHEMA_VERSION
    if type(version) is not int or version != SCHEMA_VERSION:
        message = f"this kvtool reads {SCHEMA_VERSION}, got {show(version)}"
        newer = isinstance(version, int) and version > SCHEMA_VERSION
        problem = source.problem(("schema_version",), message)
        raise DocumentError([problem], hint="upgrade kvtool" if newer else None)
