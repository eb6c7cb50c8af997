"""Hold a text token by token, with what a cache holds of each, and name its shades and marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtool.cache.whole.report import KeptTokens


@dataclass(frozen=True)
class ShadedText:
    """A text, and what a cache holds of it.

    Attributes:
        title: policy and budget.
        cost: what is held, in words.
        pieces: the text, token by token.
        kept: which layers and heads hold which token.
        prompt: tokens of the prompt; behind them the answer begins.
        answer: to the prompt; None where there is none.
    """

    title: str
    cost: str
    pieces: tuple[str, ...]
    kept: KeptTokens
    prompt: int
    answer: str | None = None


MARKS = {"merged": "merged into tokens that stay", "offloaded": "moved to host memory"}
"""Of evicted tokens, which are underlined."""


def doing(kept: KeptTokens) -> str:
    """Return what layers and heads do with a token that is shaded."""
    return f"read it in the last {kept.reads} steps" if kept.mark == "read" else "keep it"


PART = "⋯"
"""A token that ends inside a character; the character is shown at the last of its tokens."""

_BROKEN = "�"
_BEFORE = 4  # tokens in front, which a tokenizer may need to decode a token


def token_pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text.

    Joined, the pieces are the decoded text, but for the signs of tokens inside a character.

    Args:
        ids: of one text, special tokens included.
    """

    def decode(start: int, end: int) -> str:
        return str(tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False))

    pieces, done = [], 0  # the text of ids[:done] has been returned
    for end in range(1, len(ids) + 1):
        start = max(0, done - _BEFORE)
        told, text = decode(start, done), decode(start, end)
        piece = text[len(told) :] if text.startswith(told) else decode(done, end)
        if piece.endswith(_BROKEN) and end < len(ids) and end - done < _BEFORE:
            pieces.append(PART)
            continue
        pieces.append(piece or PART)
        done = end
    return pieces
