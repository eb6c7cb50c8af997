"""Virtual ids that are the tokens of a text, so that any chat client can send them.

The text names the file and goes on with one word until it has a token for each slot. The engine
makes the same tokens of it, whatever follows on a new line.
"""

from __future__ import annotations

from typing import Any

from kvtool.models.chat import Frame

_WORDS = (" x", " a", " the", "x", ".")
_NEXT = ("\nWho", "\n7 (", '\n"')


def virtual_text(
    digest: str, slots: int, tokenizer: Any, frame: Frame
) -> tuple[str, list[int]] | None:
    """Return the text of a file, and its ids behind those of the chat template.

    Args:
        digest: of what the file holds.
        frame: around the message that the cached text is.

    Returns:
        None where no word adds one token each time, or the slots are too few.
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
                return text, ids
    return None
