"""Measure by how much a policy moves the outputs of the attention layers in an answer.

See `kvtool.profiling.output_error` for the formula (CAOTE, figure 3).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BaseModel, Field

from kvtool.documents.results import Number
from kvtool.evaluation.metrics.summary import Curve, Summary
from kvtool.evaluation.samples.passages import question_samples
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter
from kvtool.evaluation.tasks.task import Lengths, Samples, Task, Tokens

if TYPE_CHECKING:
    from kvtool.evaluation.bench.bench import Bench


class LayerErrors(BaseModel):
    """What is recorded of a sample: an error per layer."""

    layers: Annotated[list[Number], Field(min_length=1)]


class OutputError(Task):
    """Normalised squared error of the attention outputs, mean over layers.

    Attributes:
        samples: prompts per length.
        new_tokens: decoded steps: the full cache's own answer, which both runs read.
        mode: `isolated` or `end_to_end`.
    """

    lengths: Lengths = (1024,)
    samples: Samples = 5
    new_tokens: Tokens = 32
    mode: Literal["isolated", "end_to_end"] = "isolated"

    record: ClassVar[type[BaseModel]] = LayerErrors
    metric: ClassVar[str] = "nmse"
    best: ClassVar[float | None] = 0.0
    lower_is_better: ClassVar[bool] = True
    droppable: ClassVar[bool] = False

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        for length in self.lengths:
            yield from question_samples(
                self.name, self.seed, length, self.samples, tokens, new_tokens=self.new_tokens
            )

    def run(self, bench: Bench, sample: Sample) -> Json:
        from kvtool.generation import generate
        from kvtool.profiling.output_error import output_error

        turn = sample.turns[0]
        text = sample.context + turn.question + turn.answer_prefix
        ids = bench.encode(text, special=True)

        def full_answer():
            return generate(
                bench.model,
                bench.tokenizer,
                bench.full_cache(),
                ids,
                max_new_tokens=self.new_tokens,
            ).input_ids[:, ids.shape[1] :]

        answer = bench.once("full answer", full_answer).to(ids.device)
        cache = bench.new_cache()
        layers = output_error(bench.model, cache, ids, answer, self.mode)
        bench.meter.read(cache)
        return {"layers": layers, "new_tokens": answer.shape[1]}

    def score(self, record: Json) -> dict[str, float]:
        return {"nmse": statistics.fmean(record["layers"])}

    def summarise(self, records: Sequence[Json]) -> Summary:
        summary = super().summarise(records)
        layers = [
            statistics.fmean(column) for column in zip(*(r["layers"] for r in records), strict=True)
        ]
        x = [float(i) for i in range(len(layers))]
        summary.curves["error by layer"] = Curve(
            x, layers, "attention layer", "normalised squared error"
        )
        return summary
