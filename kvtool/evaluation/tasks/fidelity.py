"""Compare answers of a compressed cache with those of the same model's full cache.

The reference is the full cache's own greedy answer. Two questions are asked of each variant:
reading that answer token by token, does it expect the same next tokens (agreement, Kullback-Leibler
divergence, first difference); and left alone, does it say the same (exact match, BLEU, ROUGE)?
RoCo (https://arxiv.org/abs/2402.06262, tables 2 to 4) reports the latter only; the former needs no
package and far fewer samples. METEOR is left out: it needs a download.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import BaseModel, Field, NonNegativeInt

from kvtool.documents.results import Number
from kvtool.errors import UsageError
from kvtool.evaluation.metrics.summary import Statistic, Summary
from kvtool.evaluation.metrics.text import bleu_signature, corpus_bleu, rouge, sentence_bleu
from kvtool.evaluation.samples.data import Data, documents
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
        turn = sample.turns[0]
        return compare_with_full(
            bench,
            (sample.context, turn.question + turn.answer_prefix),
            self.new_tokens,
            query_aware=self.knows_query(bench.protocol),
            question_kept=self.keeps_question(bench.protocol),
        )

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


def compare_with_full(
    bench: Bench,
    prompt: tuple[str, str],
    new_tokens: int,
    *,
    query_aware: bool,
    question_kept: bool,
) -> Json:
    """Let the variant follow the full cache's answer, then answer by itself.

    Args:
        prompt: the context, and the rest, which comes as a turn of its own unless `query_aware`.
        question_kept: whether that turn is kept whole.
    """
    from kvtool.generation import compare_logits, follow

    parts = _encode(bench, prompt, query_aware)
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


def _encode(bench: Bench, prompt: tuple[str, str], query_aware: bool) -> list[torch.Tensor]:
    """Return the token ids of what is fed at once."""
    if query_aware:
        return [bench.encode("".join(prompt), special=True)]
    later = bench.encode_on(Piece("", prompt[1]))
    return [bench.encode(prompt[0], special=True), later]


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
