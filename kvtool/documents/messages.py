"""Messages of a conversation, as the chat files that people have write them.

OpenAI's `{"role": .., "content": ..}`, whose content is a text or a list of text parts, and
ShareGPT's `{"from": .., "value": ..}`. Everything that is no text is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvtool.documents.validation import show
from kvtool.errors import UsageError, did_you_mean

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
_TOOL_ROLES = (
    *("tool", "function", "function_call", "function_response"),
    *("tool_call", "tool_response", "observation", "ipython"),
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
    """What somebody says."""

    role: Role
    content: str


def read_conversation(value: Mapping[str, Any]) -> list[Message]:
    """Read an object that holds a whole conversation under `messages` or `conversations`.

    Raises:
        UsageError: what is wrong with it, without its place in the file.
    """
    (key,) = (key for key in LISTS if key in value)
    for other in value:
        if other not in (key, "id") and value[other] not in (None, [], {}):
            refuse_key(other, (key, "id"))
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
    """Read a message; keys without a value are left out.

    Args:
        keys: of its role and of its content.

    Raises:
        UsageError: what is wrong with it, without its place in the file.
    """
    for key, other in value.items():
        if key not in keys and other not in (None, [], {}):
            refuse_key(key, keys)
    told, content = (value.get(key) for key in keys)
    if told is None or content is None:
        missing = keys[0] if told is None else keys[1]
        raise UsageError(f"a message has `{keys[0]}` and `{keys[1]}`, and `{missing}` is missing")
    if told in _TOOL_ROLES:
        raise UsageError(f"a message of the {keys[0]} `{told}` comes from tools; {_ONLY_TEXT}")
    roles = _ROLES[keys[0]]
    if not isinstance(told, str) or told not in roles:
        raise UsageError(f"no {keys[0]} {show(told)}; choose one of: {', '.join(roles)}")
    text = _join(content)
    if not text.strip():
        raise UsageError("a turn must not be empty")
    return Message(roles[told], text)


def refuse_key(key: str, known: Sequence[str]) -> None:
    """Refuse a key, by its name where it holds what is no text.

    Raises:
        UsageError: always.
    """
    if key in _NO_TEXT:
        raise UsageError(f"`{key}` holds {_NO_TEXT[key]}; {_ONLY_TEXT}")
    hint = did_you_mean(key, known)
    raise UsageError(f"unknown key `{key}`" + (f"; {hint}" if hint else ""))


def _join(content: Any) -> str:
    """Return a content's text: itself, or that of its parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UsageError(f"a turn is text, got {show(content)}")
    return "".join(_part(part) for part in content)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise UsageError(f"a part of a content is text, got {show(part)}")
    kind = part.get("type", "text")
    if kind not in _TEXT_PARTS:
        named = next((word for name, word in _KINDS.items() if name in str(kind)), None)
        told = f"a part of the type {show(kind)}" + (f" is {named}" if named else " is no text")
        raise UsageError(f"{told}; {_ONLY_TEXT}")
    for key, other in part.items():
        if key not in ("type", "text") and other not in (None, [], {}):
            refuse_key(key, ("type", "text"))
    if not isinstance(part.get("text"), str):
        raise UsageError(f"a part of a content is text, got {show(part.get('text'))}")
    return part["text"]
