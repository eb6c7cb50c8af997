"""Messages of a conversation, as the chat files that people have write them.

OpenAI's `{"role": .., "content": ..}`, whose content is a text or a list of text parts, and
ShareGPT's `{"from": .., "value": ..}`. Everything that is no text is refused by its name.
The messages that a cache has read are recorded in its file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvtool.documents.readers import load_json
from kvtool.documents.source import show
from kvtool.errors import UsageError

Role = Literal["system", "user", "assistant"]

LISTS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Keys that hold a whole conversation, and the keys of its messages."""

_ROLES: dict[str, dict[str, Role]] = {
    "role": {
        "system": "system",
        "user": "user",
        "assistant": "assistant",
        "developer": "system",
    },
    "from": {
        "system": "system",
        "human": "user",
        "gpt": "assistant",
        "user": "user",
        "assistant": "assistant",
    },
}
_WHO = {"role": "role", "from": "speaker"}
_TOOL_ROLES = (
    *("tool", "function", "function_call", "function_response", "function-call"),
    *("tool_call", "tool_calls", "tool_response", "observation", "ipython"),
)
_TEXT_PARTS = ("text", "input_text", "output_text")
_NO_TEXT = {
    "tool_calls": "tool calls",
    "tool_call_id": "the answer of a tool",
    "function_call": "a function call",
    "tools": "tools",
    "functions": "functions",
    "audio": "audio",
    "images": "images",
    "image": "an image",
    "videos": "videos",
    "video": "a video",
    "refusal": "a refusal",
    "reasoning_content": "a thought beside its text",
    "reasoning": "a thought beside its text",
    "thinking": "a thought beside its text",
}
_KINDS = {"image": "an image", "audio": "audio", "video": "a video", "file": "a file"}
_ONLY_TEXT = "kvtool reads messages of text alone"


@dataclass(frozen=True)
class Message:
    """What one speaker says."""

    role: Role
    content: str


def read_conversation(value: Mapping[str, Any]) -> list[Message]:
    """Read an object that holds a whole conversation under `messages` or `conversations`.

    Raises:
        UsageError: what is wrong with it, without its place in the file.
    """
    key, *others = (key for key in LISTS if key in value)
    for other in others + [key for key in value if key not in (*LISTS, "id")]:
        if not holds_nothing(value[other]):
            refuse_no_text(other)
            raise UsageError(f"unknown key `{other}` beside `{key}`")
    found = value[key]
    if not isinstance(found, list) or not found:
        raise UsageError(f"`{key}` is a list of messages, got {show(found)}")
    return [_read_one(each, LISTS[key], i) for i, each in enumerate(found)]


def _read_one(value: Any, keys: tuple[str, str], place: int) -> Message:
    try:
        if not isinstance(value, dict):
            raise UsageError(f"a message has `{keys[0]}` and `{keys[1]}`, got {show(value)}")
        return read_message(value, keys)
    except UsageError as error:
        raise UsageError(f"message {place}: {error.message}", hint=error.hint) from None


def read_message(value: Mapping[str, Any], keys: tuple[str, str]) -> Message:
    """Read a message; other keys may be beside it if they hold nothing.

    Args:
        keys: of its role and of its content.

    Raises:
        UsageError: what is wrong with it, without its place in the file.
    """
    has = f"a message has `{keys[0]}` and `{keys[1]}`"
    for key, other in value.items():
        if key not in keys and not holds_nothing(other):
            refuse_no_text(key)
            raise UsageError(f"{has}, and no `{key}`")
    if any(key not in value for key in keys):
        raise UsageError(has)
    role, content = (value[key] for key in keys)
    roles = _ROLES[keys[0]]
    if not isinstance(role, str) or role not in roles:
        message = f"no {_WHO[keys[0]]} {show(role)}; choose one of: {', '.join(roles)}"
        tools = isinstance(role, str) and role in _TOOL_ROLES
        raise UsageError(f"{message}; {_ONLY_TEXT}, no tools" if tools else message)
    text = _join(content)
    if not text.strip():
        raise UsageError("a turn must not be empty")
    return Message(roles[role], text)


def check_order(messages: Sequence[Message]) -> None:
    """Refuse messages whose last one is not the user's, or whose system message is not first.

    Raises:
        UsageError: the first mistake.
    """
    if any(each.role == "system" for each in messages[1:]):
        raise UsageError("a system message comes before all others")
    if messages[-1].role != "user":
        raise UsageError("there is no message to answer: the last one must be of the user")


def holds_nothing(value: Any) -> bool:
    """Return whether a key's value says no more than if the key were not there."""
    return value is None or value in ([], {}, "")


def refuse_no_text(key: str) -> None:
    """Refuse a key of something that is no text, by its name.

    Raises:
        UsageError: it is one.
    """
    if key in _NO_TEXT:
        raise UsageError(f"`{key}` holds {_NO_TEXT[key]}; {_ONLY_TEXT}")


def _join(content: Any) -> str:
    """Return a content's text: itself, or that of its parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UsageError(f"a turn is text, got {show(content)}")
    return "".join(_part(part, i) for i, part in enumerate(content))


def _part(part: Any, place: int) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise UsageError(f"a turn is text, got a list whose part {place} is {show(part)}")
    kind = part.get("type", "text")
    if kind not in _TEXT_PARTS:
        named = next((word for name, word in _KINDS.items() if name in str(kind)), "no text")
        raise UsageError(f"a part of the type {show(kind)} is {named}; {_ONLY_TEXT}")
    text = part.get("text")
    if not isinstance(text, str):
        raise UsageError(f"a turn is text, got a list whose part {place} has no `text`")
    return text


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
    answer_tokens: int
    tokens: int
    template: str

    def to_text(self) -> str | None:
        """Return it as JSON; None: too long for the head of a file."""
        data = {
            "messages": [[each.role, each.content] for each in self.messages],
            "answer_tokens": self.answer_tokens,
            "tokens": self.tokens,
            "template": self.template,
        }
        text = json.dumps(data, ensure_ascii=False)
        return text if len(text.encode()) <= _LONGEST else None


def read_history(text: str) -> ChatHistory:
    """Read what `ChatHistory.to_text` wrote.

    Raises:
        ValueError: anything else.
    """
    data = load_json(text)
    try:
        messages = tuple(Message(role, content) for role, content in data["messages"])
        history = ChatHistory(messages, data["answer_tokens"], data["tokens"], data["template"])
    except (KeyError, TypeError) as error:
        raise ValueError("it holds no messages") from error
    sound = all(isinstance(each.content, str) for each in messages) and all(
        isinstance(count, int) for count in (history.answer_tokens, history.tokens)
    )
    if not sound or not 0 <= history.answer_tokens <= history.tokens:
        raise ValueError("it holds no messages")
    return history
