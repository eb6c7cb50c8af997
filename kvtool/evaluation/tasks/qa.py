"""Questions of your own about texts of your own, from a file.

A row has `context`, `question` and `answers` (a list, or one answer). Its `id` is optional; other
columns are passed over. The headline is the F1 of the words of the answer's first line against the
reference that suits it best, as SQuAD normalises both (lower case, without punctuation and
articles).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import ClassVar

from kvtool.evaluation.metrics.text import answer_words, best, first_line, qa_f1, said
from kvtool.evaluation.samples.questions import texts_of
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import ShortAnswer
from kvtool.evaluation.tasks.task import Tokens

_COLUMNS = ("context", "question", "answers")


class Questions(ShortAnswer):
    """Answer a question about a text.

    Attributes:
        max_new_tokens: where an answer is cut off.
    """

    max_new_tokens: Tokens = 32

    metric: ClassVar[str] = "qa_f1"
    file: ClassVar[str] = "a file with context, question and answers in each row"

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        for number, row, _ in islice(self.rows(_COLUMNS, "qa"), self.samples):
            asked = f"\n\nQuestion: {row['question']}\n"
            turn = Turn(asked, texts_of(row["answers"]), self.max_new_tokens, "Answer:")
            yield Sample(str(row.get("id", number)), str(row["context"]).strip(), (turn,))

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return the F1 of the words of the first line, from 0 to 100."""
        return 100 * best(qa_f1, first_line(said(prediction)), references)

    def score(self, record: Json) -> dict[str, float]:
        """Return `qa_f1`, `exact_match` of the first line, and `string_match_part` of all."""
        (turn,) = record["turns"]
        answer, references = said(turn["prediction"]), turn["references"]
        return {
            **super().score(record),
            "exact_match": 100 * best(_same, first_line(answer), references),
            "string_match_part": 100 * best(_holds, answer, references),
        }


def _same(prediction: str, reference: str) -> float:
    return float(answer_words(prediction) == answer_words(reference))


def _holds(prediction: str, reference: str) -> float:
    """Return 1 if the words of the reference are in the answer, one after the other."""
    said, wanted = (" ".join(answer_words(text)) for text in (prediction, reference))
    return float(bool(wanted) and f" {wanted} " in f" {said} ")
