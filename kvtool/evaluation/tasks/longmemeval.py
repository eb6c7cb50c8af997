"""LongMemEval: questions about what a user said in dozens of earlier chats.

Wu et al., 2024, https://arxiv.org/abs/2410.10813, https://github.com/xiaowu0162/LongMemEval. A row
of `longmemeval_s.json` (or `_m`, `_oracle`) has `question_id` (one that ends in `_abs` asks what
was never said), `question_type`, `question`, `answer`, `question_date`, `haystack_dates` and
`haystack_sessions`, lists of messages with `role` and `content`. All sessions are the context, in
the order of their dates.

Differences: there, a large language model judges the answers. Here no model judges: an answer has
the F1 of its words, and contains the reference or does not. Where nothing was said it has to say
so, in one of the usual phrases, which the prompt asks for. So scores do not compare with published
ones, only with each other. Questions about preferences are left out, since their `answer` is a
rubric for a judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.metrics.text import abstains, best, contains, qa_f1, said
from kvtool.evaluation.samples.questions import texts_of
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import ShortAnswer

_COLUMNS = (
    *("question_id", "question_type", "question", "answer", "question_date", "haystack_dates"),
    "haystack_sessions",
)
_JUDGED = "single-session-preference"
_NEW_TOKENS = 256
_BEFORE = "Earlier chats of a user with you, each with its date. A question of the user follows.\n"
_QUESTION = (
    "\n\nToday is {date}. Answer the question from these chats, in as few words as possible. If "
    "they do not say, answer: I do not know.\nQuestion: {question}\nAnswer:"
)


class LongMemEval(ShortAnswer):
    """Answer a question from many chats."""

    metric: ClassVar[str] = "qa_f1"
    file: ClassVar[str] = "longmemeval_s.json of LongMemEval"

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        """Read the samples.

        Raises:
            UsageError: no data, or no question that can be scored.
            KvtoolError: data that lack a column, or hold sessions of another form.
        """
        rows = self.rows(_COLUMNS, "longmemeval_s")
        scored = ((row, where) for _, row, where in rows if row["question_type"] != _JUDGED)
        found = list(islice(scored, self.samples))
        if not found:
            raise UsageError(
                f"{self.name}: `{self.data}` has questions about preferences alone, whose answers "
                "only a judge can score"
            )
        for row, where in found:
            yield self._sample(row, where)

    def _sample(self, row: Mapping[str, Any], where: str) -> Sample:
        name = str(row["question_id"])
        absent = name.endswith("_abs")
        question = _QUESTION.format(date=row["question_date"], question=row["question"])
        return Sample(
            name,
            _BEFORE + _sessions(row, where),
            (Turn(question, texts_of(row["answer"]), _NEW_TOKENS),),
            {"question_type": "abstention" if absent else row["question_type"]},
            {"abstain": absent},
        )

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return the F1 of the words, from 0 to 100; of what was never said, 100 for saying so."""
        if facts["abstain"]:
            return 100.0 * abstains(said(prediction))
        return 100 * best(qa_f1, said(prediction), references)

    def score(self, record: Json) -> dict[str, float]:
        """Return `qa_f1`, and `string_match_part`: whether the answer contains the reference."""
        scores = super().score(record)
        if record["facts"]["abstain"]:
            return {**scores, "string_match_part": scores[self.metric]}
        (turn,) = record["turns"]
        found = best(contains, said(turn["prediction"]), turn["references"])
        return {**scores, "string_match_part": 100 * found}


def _sessions(row: Mapping[str, Any], where: str) -> str:
    """Return all chats as one text, in the order of their dates."""
    parts: list[str] = []
    dated = zip(row["haystack_dates"], row["haystack_sessions"], strict=True)
    try:
        for date, session in sorted(dated, key=lambda pair: pair[0]):
            session_text = "\n\n".join(
                f"{each['role']}: {each['content'].strip()}" for each in session
            )
            parts.append(f"\n### Chat {len(parts) + 1}, {date}\n\n{session_text}\n")
    except (AttributeError, KeyError, TypeError, ValueError):
        raise KvtoolError(
            f"{where}: `haystack_sessions` are no lists of messages with `role` and `content`, one "
            "for each of `haystack_dates`"
        ) from None
    return "".join(parts)
