"""Questions read from files: the columns they need and the answers they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.evaluation.metrics.code import LETTERS, right_letter


def texts_of(answer: Any) -> tuple[str, ...]:
    """Return an answer that is a text, a number or a list of them as texts."""
    if isinstance(answer, (list, tuple)):
        return tuple(str(part) for part in answer)
    return (str(answer),)


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
