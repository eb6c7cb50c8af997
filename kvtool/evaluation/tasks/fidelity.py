"""Compare answers of a compressed cache with those of the same model's full cache.

The reference is the full cache's own greedy answer. Two questions are asked of each variant:
reading that answer token by token, does it expect the same next tokens (agreement, Kullback-Leibler
divergence, first difference); and left alone, does it say the same (exact match, BLEU, ROUGE)?
RoCo (https://arxiv.org/abs/2402.06262, tables 2 to 4) reports the latter only; the former needs no
package and far fewer samples. METEOR is left out: it needs a download.

Repeating a text from its compressed cache is RoCo's section 5.3. The paper does not say what the
repetition is compared with; by default it is the full cache's own repetition, as for its summaries,
`reference: source` compares with the text itself.

By how much a policy moves the outputs of the attention layers in an answer is measured as
`kvtool.profiling.output_error` says (CAOTE, figure 3).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BaseModel, Field, NonNegativeInt

from kvtool.documents.results import Number
from kvtool.errors import UsageError
from kvtool.evaluation.metrics.summary import Curve, Statistic, Summary
from kvtool.evaluation.metrics.text import bleu_signature, corpus_bleu, rouge, sentence_bleu
from kvtool.evaluation.samples.data import Data, documents
from kvtool.evaluation.samples.fit import generator
from kvtool.evaluation.samples.haystack import haystack
from kvtool.evaluation.samples.passages import question_samples
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.task import Lengths, Samples, Task, Tokens
from kvtool.extras import installed
from kvtool.lazy_torch import torch
from kvtool.models.chat import Piece
from kvtool.sizes import MOST_TOKENS

if TYPE_CHECKING:
    from kvtool.evaluation.bench.bench import Bench


class Compared(BaseModel):
    """What is recorded of a sample: both answers, and how close they are."""

    prediction: str
    references: Annotated[list[str], Field(min_length=1)]
    agreement: Number
    kl: Number
    first_divergence: Annotated[NonNegativeInt, Field(le=MOST_TOKENS)] | None


class FidelityTask(Task):
    """Agreement with the full cache's own output.

    Attributes:
        samples: prompts per length.
        new_tokens: length of the answer at most.
        data: a text file, a dataset or a preset (`cnn_dailymail`), each text cut to the length;
            built-in texts, each with a question, else.
        instruction: what follows a text of `data`.
    """

    lengths: Lengths = (1024,)
    samples: Samples = 10
    new_tokens: Tokens = 64
    data: Data | None = None
    instruction: str = "\n\nSummarise the text above.\n\nSummary:"

    record: ClassVar[type[BaseModel]] = Compared
    metric: ClassVar[str] = "agreement"
    right_answers: ClassVar[bool] = False
    best: ClassVar[float | None] = 1.0

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        for length in self.lengths:
            cell = {"length": length}
            if self.data is None:
                yield from question_samples(
                    self.name, self.seed, length, self.samples, tokens, new_tokens=self.new_tokens
                )
                continue
            texts, _ = documents(self.data, task=self.name)
            least = self.new_tokens + tokens.special + tokens.count(self.instruction)
            if length <= least:
                raise UsageError(
                    f"{self.name}: length {length} is too short, instruction and answer take "
                    f"{least} tokens",
                    hint=f"use lengths above {least}, or fewer new_tokens",
                )
            for name, text in texts[: self.samples]:
                cut = tokens.decode(tokens.encode(text)[: length - least])
                turn = Turn(self.instruction, (), self.new_tokens)
                yield Sample(f"length={length}/{name}", cut, (turn,), cell)

    def run(self, bench: Bench, sample: Sample) -> Json:
        return compare_with_full(self, bench, sample)

    def score(self, record: Json) -> dict[str, float]:
        same = record["prediction"] == record["references"][0]
        return {
            "agreement": record["agreement"],
            "kl": record["kl"],
            "exact_match": float(same),
            **overlap(record["prediction"], record["references"][0]),
        }

    @property
    def protocol(self) -> str:
        return overlap_protocol()

    def summarise(self, records: Sequence[Json]) -> Summary:
        summary = super().summarise(records)
        summary.metrics.update(
            corpus_overlap([(r["prediction"], r["references"][0]) for r in records])
        )
        differs = [r["first_divergence"] for r in records if r["first_divergence"] is not None]
        if differs:
            first = Statistic(sum(differs) / len(differs), len(differs))
            summary.metrics["first_divergence"] = first
        return summary


def overlap(prediction: str, reference: str) -> dict[str, float]:
    """Return BLEU and ROUGE of one answer, 0 to 100, where their packages are installed."""
    if not installed("eval"):
        return {}
    scores = rouge(prediction, reference)
    return {"bleu": sentence_bleu(prediction, reference)} | {
        name: scores[name] for name in ("rouge1", "rouge2", "rougeL")
    }


def corpus_overlap(pairs: Sequence[tuple[str, str]]) -> dict[str, Statistic]:
    """Return the BLEU of all answers together, in place of the mean over answers."""
    if not installed("eval"):
        return {}
    predictions, references = zip(*pairs, strict=True)
    return {"bleu": Statistic(corpus_bleu(predictions, references), len(pairs))}


def overlap_protocol() -> str:
    """Say how BLEU and ROUGE are computed, if they are."""
    if not installed("eval"):
        return "kvtool; no BLEU or ROUGE (pip install 'kvtool[eval]')"
    return f"kvtool; corpus BLEU {bleu_signature(sentence=False)}; ROUGE with stemmer"


def compare_with_full(task: Task, bench: Bench, sample: Sample) -> Json:
    """Let the variant follow the full cache's answer, then answer by itself."""
    from kvtool.generation import compare_logits, follow

    turn, question_kept = sample.turns[0], task.keeps_question(bench.protocol)
    question, new_tokens = turn.question + turn.answer_prefix, turn.max_new_tokens
    if task.knows_query(bench.protocol):
        parts = [bench.encode(sample.context + question, special=True)]
    else:  # as a turn of its own
        later = bench.encode_on(Piece("", question))
        parts = [bench.encode(sample.context, special=True), later]
    token_ids, text, full_logits = bench.once(
        "full answer", lambda: _full_answer(bench, torch.cat(parts, 1), new_tokens)
    )
    cache = bench.new_cache()
    cache.expect_length(sum(part.shape[1] for part in parts) + new_tokens)
    for i, part in enumerate(parts):
        with cache.budgets.raising() if question_kept and i > 0 else nullcontext():
            logits = bench.feed(cache, part)
    with cache.rollback():
        followed = follow(bench.model, cache, logits, token_ids)
    close = compare_logits(full_logits, followed)
    answer = bench.decode(cache, max_new_tokens=new_tokens, temperature=0.0)
    return {
        "prediction": answer.text[0],
        "references": [text],
        "new_tokens": answer.new_tokens,
        **asdict(close),
    }


def _full_answer(
    bench: Bench, prompt: torch.Tensor, new_tokens: int
) -> tuple[torch.Tensor, str, torch.Tensor]:
    """Return the full cache's greedy answer: ids, text, and the logits of each of its tokens."""
    from kvtool.generation import compress, follow, generate

    cache = bench.full_cache()
    cache.expect_length(prompt.shape[1] + new_tokens)
    read = compress(bench.model, cache, prompt, tokenizer=bench.tokenizer)
    with cache.rollback():
        answer = generate(bench.model, bench.tokenizer, cache, None, max_new_tokens=new_tokens)
    ids = answer.input_ids[:, read.input_ids.shape[1] :]
    logits = follow(bench.model, cache, read.next_logits, ids)
    return ids, answer.text[0], logits


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
    right_answers: ClassVar[bool] = False
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
        return compare_with_full(self, bench, sample) | {"source": sample.context}

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
