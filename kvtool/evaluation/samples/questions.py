"""Questions read from files: the columns they need and the answers they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.evaluation.metrics.code import LETTERS, list_options, names_option, right_letter
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


def require(
    row: Mapping[str, Any], columns: Sequence[str], where: str, texts: Sequence[str] = ()
) -> None:
    """Check that a row, or a part of one, has what it needs; null and an empty list are nothing.

    Args:
        texts: columns that have to hold a text.

    Raises:
        KvtoolError: a column that is lacking, or holds something else.
    """
    for column in columns:
        if row.get(column) is None or row[column] == []:
            raise KvtoolError(f"{where} lacks `{column}`")
    for column in texts:
        if not isinstance(row[column], str):
            raise KvtoolError(f"{where}: `{column}` holds {type(row[column]).__name__}, no text")


@dataclass(frozen=True)
class Kind:
    """How a kind of question about a text is put and scored.

    Attributes:
        question: what follows the text; `{input}` and `{options}` are the row's.
        new_tokens: of the longest answer.
        score: the score of an answer against one reference, from 0 to 1.
    """

    question: str
    new_tokens: int
    score: Callable[..., float]

    def turn(self, row: Mapping[str, Any], where: str) -> Turn:
        """Put the question of a row.

        Raises:
            KvtoolError: the row lacks something, or its options the answer.
        """
        named = [name for name in ("input", "options") if f"{{{name}}}" in self.question]
        require(row, [*named, "answer"], where)
        references, options = texts_of(row["answer"]), ""
        if "options" in named:
            references = (option_answer(row["answer"], row["options"], where),)
            options = list_options(row["options"])
        question = self.question.format(input=row.get("input"), options=options)
        return Turn(question, references, self.new_tokens)


OPTIONS = "\n\nQuestion: {input}\n{options}\n\nThe letter of the right answer:"
"""A question with four choices."""


def option_answer(answer: Any, options: Sequence[str], where: str) -> str:
    """Return the right one of four options with its letter: `B. in the garden`.

    Raises:
        KvtoolError: there are not four options, or none of them is the answer.
    """
    letter = right_letter(texts_of(answer), options) if len(options) == len(LETTERS) else None
    if letter is None:
        raise KvtoolError(
            f"{where}: the answer `{texts_of(answer)[0]}` is none of 4 options, there are "
            f"{len(options)}"
        )
    return f"{letter}. {options[LETTERS.index(letter)]}"


def split_option(reference: str) -> tuple[str, str]:
    """Return letter and text of an `option_answer`.

    >>> split_option("B. in the garden")
    ('B', 'in the garden')
    """
    letter, _, text = reference.partition(". ")
    return letter, text


def chooses(prediction: str, reference: str) -> float:
    """Return 1 if an answer about a book names the option of an `option_answer`, else 0."""
    return float(names_option(prediction, *split_option(reference)))
