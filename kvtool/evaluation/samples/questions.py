"""Questions read from files: the columns they need and the answers they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.evaluation.metrics.code import LETTERS, right_letter
from kvtool.evaluation.samples.sample import Sample, TokenCounter, Turn

_MANY = 0.5
_LONG = 40  # letters of an answer that is more than a token


def texts_of(answer: Any) -> tuple[str, ...]:
    """Return an answer that is a text, a number or a list of them as texts."""
    if isinstance(answer, (list, tuple)):
        return tuple(str(part) for part in answer)
    return (str(answer),)


def one_token_share(samples: Sequence[Sample], tokens: TokenCounter) -> float:
    """Return the share of questions whose right answers are one token each."""
    turns = [turn for sample in samples for turn in sample.turns if turn.references]
    short = sum(
        all(_is_one_token(turn, answer, tokens) for answer in turn.references) for turn in turns
    )
    return short / len(turns) if turns else 0.0


def one_token_note(task: str, share: float) -> str | None:
    """Say that a task whose questions are known cannot compare policies; None if it can.

    Args:
        share: of its questions whose right answers are one token.
    """
    if share < _MANY:
        return None
    return (
        f"{task}: {share:.0%} of the right answers are one token, which follows from the prompt's "
        "own run before any token is evicted; all policies give the same answer unless the "
        "question comes later (--query-agnostic)"
    )


def _is_one_token(turn: Turn, answer: str, tokens: TokenCounter) -> bool:
    if len(answer) > _LONG:
        return False
    space = " " if turn.answer_prefix else ""
    whole = turn.answer_prefix + space + answer
    return tokens.count(whole) - tokens.count(turn.answer_prefix) == 1


def require(row: Mapping[str, Any], columns: Sequence[str], where: str) -> None:
    """Check that a row, or a part of one, has what it needs; null and an empty list are nothing.

    Raises:
        KvtoolError: a column that is lacking.
    """
    for column in columns:
        if row.get(column) is None or row[column] == []:
            raise KvtoolError(f"{where} lacks `{column}`")


def option_answer(answer: Any, options: Sequence[str], where: str) -> str:
    """Return the right one of four options with its letter: `B. in the garden`.

    Raises:
        KvtoolError: there are not four options, or none of them is the answer.
    """
    if len(options) != len(LETTERS):
        raise KvtoolError(f"{where} has {len(options)} options instead of 4")
    letter = right_letter(texts_of(answer), options)
    if letter is None:
        raise KvtoolError(f"{where}: none of its options is the answer `{texts_of(answer)[0]}`")
    return f"{letter}. {options[LETTERS.index(letter)]}"


def split_option(reference: str) -> tuple[str, str]:
    """Return letter and text of an `option_answer`.

    >>> split_option("B. in the garden")
    ('B', 'in the garden')
    """
    letter, _, text = reference.partition(". ")
    return letter, text
