"""Turns of a conversation from a file: what the user says, one turn a line.

Plain text, or JSON Lines. There `"..."` and `{"user": "..."}` are what the user says, as a line of
plain text is, and `{"prompt": "..."}` is text that goes in as it stands, with nothing around it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.documents.problems import DocumentError, Mark, Problem
from kvtool.documents.prompts import read_utf8
from kvtool.documents.validation import show
from kvtool.errors import UsageError, did_you_mean

_FORMS = '"text", {"user": "text"} or {"prompt": "text"}'
_KEYS = ("user", "prompt")


@dataclass(frozen=True)
class UserTurn:
    """What is said in one turn.

    Attributes:
        text: never empty.
        verbatim: whether nothing goes around it, no chat template and no line end.
    """

    text: str
    verbatim: bool = False


def read_turns(path: str) -> list[UserTurn]:
    """Read a file of turns, `-` for stdin; blank lines are left out.

    `.jsonl` is JSON Lines and `.txt` is text; what is called otherwise is JSON Lines if its first
    line that is not blank is a JSON string or begins with `{`.

    Raises:
        UsageError: missing, unreadable, not UTF-8, or without a turn.
        DocumentError: every line that is no turn, with its place.
    """
    name, text = read_utf8(path, "turns file")
    lines = [(start, line) for start, line in _lines(text) if line.strip()]
    if not lines:
        raise UsageError(f"{name} holds no turn", hint="write one turn a line")
    if not _is_jsonl(path, lines[0][1].strip()):
        return [UserTurn(line) for _, line in lines]
    shown = "<stdin>" if path == "-" else path
    turns, problems = [], []
    for start, line in lines:
        try:
            turns.append(_parse(line))
        except json.JSONDecodeError as error:
            place = Mark(shown, text, start + error.pos)
            problems.append(Problem(place, (), f"is not JSON: {error.msg.lower()}"))
        except UsageError as error:
            problems.append(Problem(Mark(shown, text, start), (), str(error)))
    if problems:
        raise DocumentError(problems, hint=f"a line of JSON Lines is {_FORMS}")
    return turns


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
        return first.startswith("{") or isinstance(json.loads(first), str)
    except json.JSONDecodeError:
        return False


def _parse(line: str) -> UserTurn:
    value: Any = json.loads(line)
    key = "user"
    if isinstance(value, dict):
        unknown = [key for key in value if key not in _KEYS]
        if unknown:
            hint = did_you_mean(unknown[0], _KEYS)
            raise UsageError(f"unknown key `{unknown[0]}`" + (f"; {hint}" if hint else ""))
        if len(value) != 1:
            raise UsageError("a turn has either `user` or `prompt`")
        ((key, value),) = value.items()
    if not isinstance(value, str):
        raise UsageError(f"a turn is text, got {show(value)}")
    if not value.strip():
        raise UsageError("a turn must not be empty")
    return UserTurn(value, verbatim=key == "prompt")
