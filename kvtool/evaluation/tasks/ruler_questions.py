"""RULER's question answering: paragraphs that hold the answer among paragraphs that do not.

Hsieh et al., 2024, https://arxiv.org/abs/2404.06654, section 3.4; the wording is our own. `qa_1`
reads the development set of SQuAD 2.0 (questions that have an answer), `qa_2` that of HotpotQA in
its distractor setting. Distractors of the same article, or those that HotpotQA names, come first,
then any. RULER puts all ten paragraphs of a HotpotQA question in; here the supporting ones must be
there and the others count as distractors, so that short lengths work too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.metrics.text import string_match_part
from kvtool.evaluation.samples.data import Data, read_json
from kvtool.evaluation.samples.fit import Rng, fit, generator
from kvtool.evaluation.samples.haystack import costs
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import Asking, given
from kvtool.evaluation.tasks.task import Lengths, Samples

_NEW_TOKENS = 32


@dataclass(frozen=True)
class Asked:
    """A question; `gold` paragraphs answer it, `near` ones are about the same subjects."""

    question: str
    answers: tuple[str, ...]
    gold: tuple[str, ...]
    near: tuple[str, ...]

    @property
    def paragraphs(self) -> tuple[str, ...]:
        """All that came with the question."""
        return self.gold + self.near


@dataclass(frozen=True)
class Source:
    """A question-answering data set: its file and how that is read."""

    file: str
    read: Callable[[Any], list[Asked]]


def read_squad(value: Any) -> list[Asked]:
    """Read `{"data": [{"paragraphs": [{"context", "qas": [{"question", "answers"}]}]}]}`."""
    asked = []
    for article in value["data"]:
        contexts = tuple(paragraph["context"] for paragraph in article["paragraphs"])
        for paragraph, context in zip(article["paragraphs"], contexts, strict=True):
            near = tuple(other for other in contexts if other != context)
            for qa in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in qa["answers"]))
                if answers and not qa.get("is_impossible", False):
                    asked.append(Asked(qa["question"], answers, (context,), near))
    return asked


def read_hotpot(value: Any) -> list[Asked]:
    """Read `[{"question", "answer", "context": [[title, sentences]], "supporting_facts"}]`."""
    asked = []
    for row in value:
        supporting = {title for title, _ in row["supporting_facts"]}
        paragraphs = [(title, f"{title}\n{''.join(text)}") for title, text in row["context"]]
        gold = tuple(text for title, text in paragraphs if title in supporting)
        near = tuple(text for title, text in paragraphs if title not in supporting)
        if not gold:
            raise ValueError(f"no supporting paragraph for `{row['question']}`")
        asked.append(Asked(row["question"], (row["answer"],), gold, near))
    return asked


SOURCES = {
    "ruler/qa_1": Source("dev-v2.0.json of SQuAD 2.0", read_squad),
    "ruler/qa_2": Source("hotpot_dev_distractor_v1.json of HotpotQA", read_hotpot),
}


class RulerQuestions(Asking):
    """Answer a question from paragraphs.

    Attributes:
        lengths: tokens of a prompt and the longest answer together.
        samples: questions for each length, the same ones for all.
        data: the file with the questions.
    """

    lengths: Lengths = (1024,)
    samples: Samples = 20
    data: Data | None = None

    metric: ClassVar[str] = "string_match_part"

    @property
    def missing(self) -> str | None:
        """Which file is needed."""
        return None if self.data else f"data: {SOURCES[self.name].file}"

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        """Draw questions, and paragraphs for each.

        Raises:
            UsageError: fewer questions than samples, a length that is too short or too long.
        """
        questions = self._read()
        paragraphs = list(dict.fromkeys(text for asked in questions for text in asked.paragraphs))
        if self.samples > len(questions):
            raise UsageError(
                f"{self.name}: {self.samples} samples, but `{self.data}` has only "
                f"{len(questions)} questions with an answer"
            )
        chosen = generator(self.seed, self.name).permutation(len(questions))[: self.samples]
        for length in self.lengths:
            for index, which in enumerate(chosen.tolist()):
                rng = generator(self.seed, self.name, length, index)
                name = f"length={length}/{index}"
                yield self._put(rng, name, length, questions[which], paragraphs, tokens)

    def _put(
        self,
        rng: Rng,
        name: str,
        length: int,
        asked: Asked,
        paragraphs: Sequence[str],
        tokens: TokenCounter,
    ) -> Sample:
        others = _distractors(rng, asked, paragraphs, length, tokens)
        weights = costs(others, tokens)
        if sum(weights) < length:
            raise UsageError(
                f"{self.name}: `{self.data}` has paragraphs for only {sum(weights)} tokens, "
                f"length {length} needs more"
            )
        order = int(rng.integers(2**32))
        question = (
            "\n\nAnswer the question from the documents, in as few words as possible."
            f"\nQuestion: {asked.question}"
        )
        turn = Turn(question, asked.answers, _NEW_TOKENS, "\nAnswer:")

        def build(count: int) -> Sample:
            shown = [*asked.gold, *others[:count]]
            shuffled = [shown[i] for i in np.random.default_rng(order).permutation(len(shown))]
            context = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(shuffled, 1))
            return Sample(name, context, (turn,), {"length": length})

        return fit(build, weights, length, tokens, self.name)

    def _read(self) -> list[Asked]:
        value, _ = read_json(given(self, self.data), task=self.name)
        source = SOURCES[self.name]
        try:
            return source.read(value)
        except (KeyError, TypeError, ValueError) as error:
            raise KvtoolError(
                f"{self.name}: `{self.data}` has not the form of {source.file}: {error!r}"
            ) from None

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return 100 if any of the right answers is part of the answer, else 0."""
        return 100 * string_match_part(prediction, references)


def _distractors(
    rng: Rng, asked: Asked, paragraphs: Sequence[str], length: int, tokens: TokenCounter
) -> list[str]:
    """Draw paragraphs for more than `length` tokens, those about the same subjects first."""
    known = {*asked.gold, *asked.near}
    first = [asked.near[i] for i in rng.permutation(len(asked.near))]
    order = rng.permutation(len(paragraphs))
    then = (paragraphs[i] for i in order if paragraphs[i] not in known)
    drawn: list[str] = []
    left = 2 * length
    for text in itertools.chain(first, then):
        if left < 0:
            break
        drawn.append(text)
        left -= costs([text], tokens)[0]
    return drawn
