"""A text token by token, and what a cache holds of each."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.cache.kept import KeptTokens


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
