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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvtool.documents.files import read_utf8
from kvtool.documents.messages import LISTS, Message, read_conversation, read_message
from kvtool.documents.readers import Item, json_array, json_lines, load_json
from kvtool.documents.source import problem_of, show
from kvtool.documents.tree import DocumentError, Mark, Problem
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
    if not text.strip():
        raise UsageError(f"{name} holds no turn", hint="write one turn a line")
    shown = "<stdin>" if path == "-" else path
    suffix, start = Path(path).suffix.lower(), text.lstrip()
    if suffix == ".json" or _is_array(start, suffix):
        return _join(json_array(text, shown), name)
    first = start.split("\n", 1)[0]
    if suffix == ".jsonl" or (
        suffix != ".txt" and (first.startswith("{") or isinstance(_value(first), str))
    ):
        return _join(json_lines(text, shown), name)
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return Turns([UserTurn(line) for line in lines if line.strip()])


def make_turns(items: Sequence[Any]) -> Turns:
    """Return the turns that a list holds, each of them as a file has it.

    Raises:
        UsageError: none, or none that is answered.
        DocumentError: everything that is no turn.
    """
    if not items:
        raise UsageError("turns hold no turn")
    return _join([(Mark("turns"), partial(lambda item: item, item)) for item in items], "turns")


def _is_array(start: str, suffix: str) -> bool:
    """Whether a text is one JSON array or conversation, or an array that cannot be read."""
    value = _value(start) if start[0] in "[{" else None
    if isinstance(value, (list, dict)):
        return isinstance(value, list) or any(key in value for key in LISTS)
    damaged = start[0] == "[" and start[1:].lstrip()[:1] in ("{", '"')
    return damaged and suffix not in (".txt", ".jsonl")


def _value(text: str) -> Any:
    try:
        return load_json(text)
    except ValueError:
        return None


@dataclass(frozen=True)
class _Said:
    """What one speaker says, and whether it begins or ends what one object holds."""

    message: Message
    verbatim: bool = False
    begins: bool = False
    ends: bool = False


def _join(items: Iterable[Item], name: str) -> Turns:
    """Read items, and put answers that are given to their questions.

    Raises:
        UsageError: no turn is to be answered.
        DocumentError: what is no turn; messages in an order that no conversation has.
    """
    found: list[tuple[Mark, _Said]] = []
    problems: list[Problem] = []
    for mark, read in items:
        try:
            found += [(mark, said) for said in _parse(read())]
        except ValueError as error:
            problems.append(problem_of(mark, error))
    if problems:
        raise DocumentError(problems, hint=f"a turn is {_FORMS}")
    turns: list[UserTurn] = []
    system, before = None, None
    for mark, said in found:
        (role, text), message = said.message, None
        if said.begins and before and before.ends and before.message.role == "assistant":
            message = "another conversation begins here, and --turns is one (--prompts takes many)"
            raise DocumentError([*problems, Problem(mark, (), message)])
        if role == "system":
            if before is not None:
                message = "a system message comes before all others"
            system = text
        elif role == "user":
            turns.append(UserTurn(text, said.verbatim))
        elif not turns:
            turns.append(UserTurn("", answer=text))
        elif turns[-1].answer is None and not turns[-1].verbatim:
            turns[-1] = replace(turns[-1], answer=text)
        else:
            message = "an assistant message comes after one of the user"
        if message:
            problems.append(Problem(mark, (), message))
        before = said
    if problems:
        raise DocumentError(problems)
    if all(turn.answer is not None for turn in turns):
        raise UsageError(
            f"{name} holds no message to answer", hint="its last message must be one of the user"
        )
    return Turns(turns, system)


def _parse(value: Any) -> list[_Said]:
    """Read one item of a file.

    Raises:
        UsageError: what is wrong with it, without its place.
    """
    key = "user"
    if isinstance(value, dict):
        for keys in LISTS.values():
            if any(key in value for key in keys):
                return [_Said(read_message(value, keys))]
        if any(key in value for key in LISTS):
            messages = read_conversation(value)
            last = len(messages) - 1
            return [_Said(m, begins=i == 0, ends=i == last) for i, m in enumerate(messages)]
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
    return [_Said(Message("user", value), verbatim=key == "prompt")]
