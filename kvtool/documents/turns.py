"""Turns of a conversation from a file: what the user says, and answers that are given.

Lines of plain text, JSON Lines, or one JSON array, which hold

    "text", {"user": "text"}              what the user says, as a line of plain text is
    {"prompt": "text"}                    text that goes in unchanged, with nothing around it
    {"role": "user", "content": "text"}   a message as chat interfaces have it; an answer of the
                                          role `assistant` is given, `system` comes before all
    {"messages": [..]}                    a whole conversation, or a part of one; ShareGPT's
                                          {"conversations": [{"from": .., "value": ..}]}, too
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtool.documents.files import read_utf8
from kvtool.documents.messages import (
    LISTS,
    Message,
    read_conversation,
    read_message,
    refuse_no_text,
)
from kvtool.documents.readers import load_json, parse_json
from kvtool.documents.source import show
from kvtool.documents.tree import DocumentError, Mark, Node, Problem
from kvtool.errors import UsageError, did_you_mean

_FORMS = '"text", {"user": "text"}, {"prompt": "text"} or {"role": "user", "content": "text"}'
_KEYS = ("user", "prompt", "role", "content", *LISTS)


@dataclass(frozen=True)
class UserTurn:
    """What is said in one turn.

    Attributes:
        text: of the user; empty only where an answer is given to what was said before the turns.
        verbatim: whether nothing goes around it, no chat template and no line end.
        answer: the answer that is given; None: one is generated.
        begun: the beginning of the answer that is generated, which the model goes on from.
    """

    text: str
    verbatim: bool = False
    answer: str | None = None
    begun: str = ""


@dataclass(frozen=True)
class Turns:
    """What a file of turns holds; at least one turn wants an answer."""

    turns: list[UserTurn]
    system: str | None = None


def read_turns(path: str) -> Turns:
    """Read a file of turns, `-` for stdin; blank lines are left out.

    `.json` is a JSON array, `.jsonl` is JSON Lines and `.txt` is text. A file with another name is
    JSON Lines if its first line that is not blank is a JSON string or begins with `{`. A file that
    is one JSON array as a whole is read as that, whatever it is called.

    Raises:
        UsageError: missing, unreadable, not UTF-8, or without a turn.
        DocumentError: everything that is no turn, with its place.
    """
    name, text = read_utf8(path, "turns file")
    lines = [(start, line) for start, line in _lines(text) if line.strip()]
    if not lines:
        raise UsageError(f"{name} holds no turn", hint="write one turn a line")
    shown = "<stdin>" if path == "-" else path
    if _is_array(path, text):
        items = _read_array(text, shown)
    elif _is_jsonl(path, lines[0][1].strip()):
        items = _read_lines(text, shown, lines)
    else:
        return Turns([UserTurn(line) for _, line in lines])
    return _answered(_join(items), name)


def make_turns(items: Sequence[Any]) -> Turns:
    """Return the turns that a list holds, each of them as a file has it.

    Raises:
        UsageError: none, or none that is answered.
        DocumentError: everything that is no turn.
    """
    if not items:
        raise UsageError("turns hold no turn")
    mark = Mark("turns")
    found: list[tuple[Mark, _Item]] = []
    problems: list[Problem] = []
    for item in items:
        _collect(Node.of(item, mark), found, problems)
    return _answered(_join(_checked(found, problems)), "turns")


def _answered(turns: Turns, name: str) -> Turns:
    """Refuse turns without a message to answer."""
    if all(turn.answer is not None for turn in turns.turns):
        raise UsageError(
            f"{name} holds no message to answer", hint="its last message must be one of the user"
        )
    return turns


def _is_array(path: str, text: str) -> bool:
    """Whether a text is meant as one JSON array: it is one, or begins as one of these would."""
    suffix, start = Path(path).suffix.lower(), text.lstrip()
    if suffix == ".json":
        return True
    if start.startswith("{"):
        return _is_conversation(text)
    if not start.startswith("["):
        return False
    if suffix not in (".txt", ".jsonl") and start[1:].lstrip()[:1] in ("{", '"'):
        return True
    try:
        return isinstance(load_json(text), list)
    except ValueError:
        return False


def _is_conversation(text: str) -> bool:
    """Whether a text is one JSON object that holds a conversation, perhaps over several lines."""
    try:
        value = load_json(text)
    except ValueError:
        return False
    return isinstance(value, dict) and any(key in value for key in LISTS)


def _read_array(text: str, shown: str) -> list[tuple[Mark, _Item]]:
    node = parse_json(text, shown)
    if not isinstance(node.value, list):
        node = replace(node, value=[node])
    items: list[tuple[Mark, _Item]] = []
    problems: list[Problem] = []
    for item in node.value:
        _collect(item, items, problems)
    return _checked(items, problems)


def _read_lines(
    text: str, shown: str, lines: Iterable[tuple[int, str]]
) -> list[tuple[Mark, _Item]]:
    items: list[tuple[Mark, _Item]] = []
    problems: list[Problem] = []
    for start, line in lines:
        try:
            value = load_json(line, unique=True)
        except json.JSONDecodeError as error:
            place = Mark(shown, text, start + error.pos)
            problems.append(Problem(place, (), f"is not JSON: {error.msg.lower()}"))
        except ValueError as error:
            problems.append(Problem(Mark(shown, text, start), (), str(error)))
        else:
            _collect(Node.of(value, Mark(shown, text, start)), items, problems)
    return _checked(items, problems)


def _collect(node: Node, items: list[tuple[Mark, _Item]], problems: list[Problem]) -> None:
    try:
        items += [(node.mark, item) for item in _parse(node.data)]
    except UsageError as error:
        problems.append(Problem(node.mark, (), str(error)))


def _checked(items: list[tuple[Mark, _Item]], problems: list[Problem]) -> list[tuple[Mark, _Item]]:
    if problems:
        raise DocumentError(problems, hint=f"a turn is {_FORMS}")
    return items


def _join(items: list[tuple[Mark, _Item]]) -> Turns:
    """Put answers that are given to their questions.

    Raises:
        DocumentError: messages in an order that no conversation has.
    """
    turns: list[UserTurn] = []
    system, problems = None, []
    for i, (mark, item) in enumerate(items):
        before = items[i - 1][1] if i > 0 else None
        if item.begins and before is not None and before.ends and before.role == "assistant":
            message = "another conversation begins here, and --turns is one"
            problems.append(Problem(mark, (), f"{message} (--prompts takes one a line)"))
            break
        if item.role == "system":
            if i > 0:
                problems.append(Problem(mark, (), "a system message comes before all others"))
            system = item.text
        elif item.role == "user":
            turns.append(UserTurn(item.text, item.verbatim))
        elif not turns:
            turns.append(UserTurn("", answer=item.text))
        elif turns[-1].answer is None and not turns[-1].verbatim:
            turns[-1] = replace(turns[-1], answer=item.text)
        else:
            problems.append(Problem(mark, (), "an assistant message comes after one of the user"))
    if problems:
        raise DocumentError(problems)
    return Turns(turns, system)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Where each line begins, and the line; only LF ends one, as JSON may hold other ends."""
    start = 0
    for line in text.split("\n"):
        yield start, line.removesuffix("\r")
        start += len(line) + 1


def _is_jsonl(path: str, first: str) -> bool:
    suffix = Path(path).suffix.lower()
    if suffix in (".jsonl", ".txt"):
        return suffix == ".jsonl"
    try:
        return first.startswith("{") or isinstance(load_json(first), str)
    except ValueError:
        return False


@dataclass(frozen=True)
class _Item:
    """What one speaker says, and whether it begins or ends what one object holds."""

    role: str
    text: str
    verbatim: bool = False
    begins: bool = False
    ends: bool = False

    @classmethod
    def of(cls, message: Message) -> _Item:
        return cls(message.role, message.content)


def _parse(value: Any) -> list[_Item]:
    """Read one item of a file.

    Raises:
        UsageError: what is wrong with it, without its place.
    """
    key = "user"
    if isinstance(value, dict):
        for keys in LISTS.values():
            if any(key in value for key in keys):
                return [_Item.of(read_message(value, keys))]
        if any(key in value for key in LISTS):
            items = [_Item.of(message) for message in read_conversation(value)]
            items[0] = replace(items[0], begins=True)
            return [*items[:-1], replace(items[-1], ends=True)]
        unknown = [key for key in value if key not in _KEYS]
        if unknown:
            refuse_no_text(unknown[0])
            hint = did_you_mean(unknown[0], _KEYS)
            raise UsageError(f"unknown key `{unknown[0]}`" + (f"; {hint}" if hint else ""))
        if len(value) != 1:
            raise UsageError("a turn has either `user` or `prompt`")
        ((key, value),) = value.items()
    if not isinstance(value, str):
        raise UsageError(f"a turn is text, got {show(value)}")
    if not value.strip():
        raise UsageError("a turn must not be empty")
    return [_Item("user", value, verbatim=key == "prompt")]
