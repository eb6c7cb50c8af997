"""Repeat a text from its compressed cache (RoCo, https://arxiv.org/abs/2402.06262, section 5.3).

The paper does not say what the repetition is compared with; by default it is the full cache's own
repetition, as for its summaries, `reference: source` compares with the text itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel

from kvtool.errors import UsageError
from kvtool.evaluation.metrics.summary import Summary
from kvtool.evaluation.samples.data import Data, documents
from kvtool.evaluation.samples.fit import generator
from kvtool.evaluation.samples.haystack import haystack
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.fidelity import (
    Compared,
    compare_with_full,
    corpus_overlap,
    overlap,
    overlap_protocol,
)
from kvtool.evaluation.tasks.task import Lengths, Samples, Task

if TYPE_CHECKING:
    from kvtool.evaluation.bench.bench import Bench


class Repeated(Compared):
    """What is recorded of a sample: as of `fidelity`, and the text that was to be repeated."""

    source: str


class Reconstruct(Task):
    """BLEU of a text repeated from memory; the answer may be as long as the text.

    Attributes:
        lengths: tokens of the text, instruction and repetition excluded.
        samples: texts per length.
        reference: what a repetition is compared with.
        data: a text file, a dataset or a preset (`cnn_dailymail`); built-in text else.
    """

    lengths: Lengths = (256,)
    samples: Samples = 10
    reference: Literal["full", "source"] = "full"
    data: Data | None = None
    instruction: str = "\n\nRepeat the text above, word by word.\n\n"

    record: ClassVar[type[BaseModel]] = Repeated
    metric: ClassVar[str] = "bleu"
    extra: ClassVar[str | None] = "eval"

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        for length in self.lengths:
            needed = tokens.special + 2 * length + tokens.count(self.instruction)
            if tokens.limit is not None and needed > tokens.limit:
                raise UsageError(
                    f"{self.name}: length {length} takes {needed} tokens with its repetition, the "
                    f"model was trained for {tokens.limit}",
                    hint=f"lengths below {tokens.limit // 2}",
                )
            texts = self._texts(length, tokens)
            for name, text in texts[: self.samples]:
                text = tokens.decode(tokens.encode(text)[:length])
                turn = Turn(self.instruction, (text,), length)
                yield Sample(f"length={length}/{name}", text, (turn,), {"length": length})

    def _texts(self, length: int, tokens: TokenCounter) -> list[tuple[str, str]]:
        if self.data is not None:
            return documents(self.data, task=self.name)[0]
        return [
            (
                str(i),
                "".join(
                    haystack().sentences(generator(self.seed, self.name, length, i), length, tokens)
                ),
            )
            for i in range(self.samples)
        ]

    def run(self, bench: Bench, sample: Sample) -> Json:
        turn = sample.turns[0]
        record = compare_with_full(
            bench,
            (sample.context, turn.question),
            turn.max_new_tokens,
            query_aware=self.knows_query(bench.protocol),
            question_kept=self.keeps_question(bench.protocol),
        )
        return record | {"source": sample.context}

    @property
    def protocol(self) -> str:
        return overlap_protocol()

    def _right(self, record: Json) -> str:
        return record["source"] if self.reference == "source" else record["references"][0]

    def score(self, record: Json) -> dict[str, float]:
        scores = overlap(record["prediction"], self._right(record))
        return scores | {"agreement": 100 * record["agreement"]}

    def summarise(self, records: Sequence[Json]) -> Summary:
        summary = super().summarise(records)
        pairs = [(record["prediction"], self._right(record)) for record in records]
        summary.metrics.update(corpus_overlap(pairs))
        return replace(summary, parts=[])  # the BLEU of all answers is no mean of theirs
