"""Messages of a conversation, as the chat files that people have write them.

OpenAI's `{"role": .., "content": ..}`, whose content is a text or a list of text parts, and
ShareGPT's `{"from": .., "value": ..}`. What is no text is refused.
The messages that a cache has read are recorded in its file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import NonNegativeInt, TypeAdapter

from kvtool.documents.source import show
from kvtool.errors import UsageError

Role = Literal["system", "user", "assistant"]

LISTS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Keys that hold a whole conversation, and the keys of its messages."""

_OPENAI: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "developer": "system",
}
_SHAREGPT: dict[str, Role] = {
    "system": "system",
    "human": "user",
    "gpt": "assistant",
    "user": "user",
    "assistant": "assistant",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_ONLY_TEXT = "kvtool reads messages of text alone"


class Message(NamedTuple):
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
    """Read a message; other keys may be beside it if they hold nothing.

    Args:
        keys: of its role and of its content.

    Raises:
        UsageError: what is wrong with it, without its place in the file.
    """
    has = f"a message has `{keys[0]}` and `{keys[1]}`"
    if not isinstance(value, dict):
        raise UsageError(f"{has}, got {show(value)}")
    more = [key for key, other in value.items() if key not in keys and not holds_nothing(other)]
    if more:
        raise UsageError(f"{has}, and no `{more[0]}`; {_ONLY_TEXT}")
    if any(key not in value for key in keys):
        raise UsageError(has)
    role, content = (value[key] for key in keys)
    roles = _OPENAI if keys[0] == "role" else _SHAREGPT
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
    """Read what `ChatHistory.to_text` wrote.

    Raises:
        ValueError: anything else.
    """
    history = TypeAdapter(ChatHistory).validate_json(text)
    if history.answer_tokens > history.tokens:
        raise ValueError("its answer has more tokens than the whole text")
    return history
