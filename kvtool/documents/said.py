"""What has been said in a conversation that a cache holds, as its file records it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvtool.documents.json_reader import load_json
from kvtool.documents.messages import Message

_LONGEST = 16 * 2**20  # characters; the head of a safetensors file has room for 100 MB


@dataclass(frozen=True)
class Said:
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


def read_said(text: str) -> Said:
    """Read what `Said.to_text` wrote.

    Raises:
        ValueError: anything else.
    """
    data = load_json(text)
    try:
        messages = tuple(Message(role, content) for role, content in data["messages"])
        said = Said(messages, data["answer_tokens"], data["tokens"], data["template"])
    except (KeyError, TypeError) as error:
        raise ValueError("it holds no messages") from error
    sound = all(isinstance(each.content, str) for each in messages) and all(
        isinstance(count, int) for count in (said.answer_tokens, said.tokens)
    )
    if not sound or not 0 <= said.answer_tokens <= said.tokens:
        raise ValueError("it holds no messages")
    return said
