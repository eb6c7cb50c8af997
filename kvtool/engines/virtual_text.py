"""Virtual ids that are the tokens of a text, so that any chat client can send them.

The text names the file and goes on with one word until it has a token for each slot. The engine
makes the same tokens of it, whatever follows on a new line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtool.models.chat import Frame

_WORDS = (" x", " a", " the", "x", ".")
_NEXT = ("\nWho", "\n7 (", '\n"')


@dataclass(frozen=True)
class VirtualText:
    """A text of as many tokens as a cache has slots.

    Attributes:
        text: what the user's message begins with; a question follows on a new line.
        ids: its tokens, and before them those of the chat template.
    """

    text: str
    ids: list[int]


def virtual_text(digest: str, slots: int, tokenizer: Any, frame: Frame) -> VirtualText | None:
    """Return the text of a file; None: the tokenizer has no word that adds one token each time.

    Args:
        digest: of what the file holds.
        frame: around the message that the cached text is.
    """

    def encode(text: str) -> list[int]:
        return tokenizer(frame.opening + text, add_special_tokens=frame.special)["input_ids"]

    named = f"kvtool cache {digest[:12]}."
    room = slots - len(encode(named))
    for word in _WORDS:
        for count in range(room, room + 2):  # the first word may join the text before it
            text = named + word * max(0, count)
            ids = encode(text)
            followed = [encode(text + each) for each in _NEXT]
            if len(ids) == slots and all(each[:slots] == ids for each in followed):
                return VirtualText(text, ids)
    return None
