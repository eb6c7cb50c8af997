"""Messages and turns of a conversation, as the chat files that people have write them.

OpenAI's `{"role": .., "content": ..}`, whose content is a text or a list of text parts, and
ShareGPT's `{"from": .., "value": ..}`. What is no text is refused. A file of turns has lines of
plain text, JSON Lines, or one JSON array, which hold

    "text", {"user": "text"}              what the user says, as a line of plain text is
    {"prompt": "text"}                    text that goes in unchanged, with nothing around it
    {"role": "user", "content": "text"}   a message as chat interfaces have it; an answer of the
                                          role `assistant` is given, `system` comes before all
    {"messages": [..]}                    a whole conversation, or a part of one; ShareGPT's
                                          {"conversations": [{"from": .., "value": ..}]}, too

The messages that a cache has read are recorded in its file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from pydantic import NonNegativeInt, TypeAdapter

from kvtool.documents.files import read_utf8
from kvtool.documents.readers import Item, json_array, json_lines, try_json
from kvtool.documents.source import problem_of, show
from kvtool.documents.tree import DocumentError, Mark, Problem
from kvtool.errors import UsageError, quote

Role = Literal["system", "user", "assistant"]

LISTS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Keys that hold a whole conversation, and the keys of its messages."""

_OTHERS: dict[str, dict[str, Role]] = {  # names of roles, beside their own
    "role": {"developer": "system"},
    "from": {"human": "user", "gpt": "assistant"},
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_ONLY_TEXT = "kvtool reads messages of text alone"


class Message(NamedTuple):
    """What one speaker says."""

    role: Role
    content: str


def read_conversation(value: Mapping[str, Any]) -> list[Message]:
    """Read an object that holds a whole conversation; `UsageError` as of `read_message`."""
    key, *others = (key for key in LISTS if key in value)
    for other in others + [key for key in value if key not in (*LISTS, "id")]:
        if not holds_nothing(value[other]):
            raise UsageError(f"unknown key `{other}` beside `{key}`; {_ONLY_TEXT}")
    found = value[key]
    if not isinstance(found, list) or not found:
        raise UsageError(f"`{key}` is a list of messages, got {show(found)}")
    messages = []
    for i, each in enumerate(found):
        try:
            messages.append(read_message(each, LISTS[key]))
        except UsageError as error:
            raise UsageError(f"message {i}: {error.message}") from None
    return messages


def read_message(value: Any, keys: tuple[str, str]) -> Message:
    """Read a message; keys other than those of role and content may be there if they hold nothing.

    Raises:
        UsageError: what is wrong with it, without its place in the file.
    """
    given = value
    if isinstance(value, dict):
        given = {key: v for key, v in value.items() if key in keys or not holds_nothing(v)}
    if not isinstance(given, dict) or given.keys() != set(keys):
        got = ", ".join(map(quote, given)) if isinstance(given, dict) else show(given)
        has = f"a message has `{keys[0]}` and `{keys[1]}`, got {got or 'nothing'}"
        raise UsageError(f"{has}; {_ONLY_TEXT}")
    role, content = (value[key] for key in keys)
    roles: dict[str, Role] = {role: role for role in get_args(Role)} | _OTHERS[keys[0]]
    if not isinstance(role, str) or role not in roles:
        choices = ", ".join(roles)
        raise UsageError(f"no {keys[0]} {show(role)}; choose one of: {choices}; {_ONLY_TEXT}")
    parts = content if isinstance(content, list) else [content]
    text = "".join(map(_part, parts))
    if not text.strip():
        raise UsageError("a turn must not be empty")
    return Message(roles[role], text)


def _part(part: Any) -> str:
    """Return the text of a content, or of one of its parts."""
    if isinstance(part, dict):
        kind = part.get("type", "text")
        if kind not in _TEXT_PARTS:
            raise UsageError(f"a part of the type {show(kind)} is no text; {_ONLY_TEXT}")
        part = part.get("text")
    if not isinstance(part, str):
        raise UsageError(f"a turn is text, or a list of texts, got {show(part)}")
    return part


def check_order(messages: Sequence[Message]) -> None:
    """Refuse messages whose last one is not the user's, or whose system message is not first."""
    if any(each.role == "system" for each in messages[1:]):
        raise UsageError("a system message comes before all others")
    if messages[-1].role != "user":
        raise UsageError("there is no message to answer: the last one must be of the user")


def holds_nothing(value: Any) -> bool:
    """Return whether a key's value says no more than if the key were not there."""
    return value is None or value in ([], {}, "")


_LONGEST = 16 * 2**20  # characters; the head of a safetensors file holds 100 MB


@dataclass(frozen=True)
class ChatHistory:
    """Messages that a cache has read in the words of a chat template.

    Attributes:
        messages: without an answer that the model has generated last.
        answer_tokens: of the answer that the model has generated last; 0: it has not.
        tokens: of the whole text.
        template: a hash of the chat template.
    """

    messages: tuple[Message, ...]
    answer_tokens: NonNegativeInt
    tokens: NonNegativeInt
    template: str

    def to_text(self) -> str | None:
        """Return it as JSON; None: too long for the head of a file."""
        data = TypeAdapter(ChatHistory).dump_json(self)
        return data.decode() if len(data) <= _LONGEST else None


def read_history(text: str) -> ChatHistory:
    """Read what `ChatHistory.to_text` wrote; anything else is a `ValueError`."""
    history = TypeAdapter(ChatHistory).validate_json(text)
    if history.answer_tokens > history.tokens:
        raise ValueError("its answer has more tokens than the whole text")
    return history


_FORMS = '"text", {"user": "text"}, {"prompt": "text"} or {"role": "user", "content": "text"}'


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
        suffix != ".txt" and (first.startswith("{") or isinstance(try_json(first), str))
    ):
        return _join(json_lines(text, shown), name)
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return Turns([UserTurn(line) for line in lines if line.strip()])


def make_turns(items: Sequence[Any]) -> Turns:
    """Return the turns that a list holds, each of them as a file has it; see `read_turns`."""
    if not items:
        raise UsageError("turns hold no turn")
    return _join([(Mark("turns"), partial(lambda item: item, item)) for item in items], "turns")


def _is_array(start: str, suffix: str) -> bool:
    """Whether a text is one JSON array or conversation, or an array that cannot be read."""
    value = try_json(start) if start[0] in "[{" else None
    if isinstance(value, (list, dict)):
        return isinstance(value, list) or any(key in value for key in LISTS)
    damaged = start[0] == "[" and start[1:].lstrip()[:1] in ("{", '"')
    return damaged and suffix not in (".txt", ".jsonl")


@dataclass(frozen=True)
class _Said:
    """What one speaker says, and whether it begins or ends what one object holds."""

    message: Message
    verbatim: bool = False
    begins: bool = False
    ends: bool = False


def _join(items: Iterable[Item], name: str) -> Turns:
    """Read items, put given answers to their questions, and check the order of messages."""
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
    """Read one item of a file; say what is wrong with it without its place."""
    key = "user"
    if isinstance(value, dict):
        for keys in LISTS.values():
            if any(key in value for key in keys):
                return [_Said(read_message(value, keys))]
        if any(key in value for key in LISTS):
            messages = read_conversation(value)
            last = len(messages) - 1
            return [_Said(m, begins=i == 0, ends=i == last) for i, m in enumerate(messages)]
        if len(value) != 1 or value.keys() - {"user", "prompt"}:
            got = ", ".join(map(quote, value)) or "nothing"
            raise UsageError(f"a turn has either `user` or `prompt`, got {got}")
        ((key, value),) = value.items()
    if not isinstance(value, str):
        raise UsageError(f"a turn is text, got {show(value)}")
    if not value.strip():
        raise UsageError("a turn must not be empty")
    return [_Said(Message("user", value), verbatim=key == "prompt")]
