"""Perplexity under a budget: a text is followed token by token through the evicting cache.

Each document begins with an empty cache and the tokenizer's first token. Positions stay the true
ones. The likelihood of a token comes from what the cache held before it, and every variant scores
the same positions, so that variants compare. Numbers measured with another `chunk` do not. With
`prompt`, the beginning is read and cut as a prompt is, and the rest is followed as an answer.
StreamingLLM (https://arxiv.org/abs/2309.17453, section 4.1) keeps its cache from one document to
the next; this does not. EasyKV scores fewer tokens under a budget than without one; this does not
either.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, model_validator

from kvtool.documents.results import Number
from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.metrics.summary import LINKS, Curve, Statistic, Summary, mean
from kvtool.evaluation.samples.data import Data, documents
from kvtool.evaluation.samples.passages import recap_passage
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter
from kvtool.evaluation.tasks.task import Lengths, Samples, Task, Tokens

if TYPE_CHECKING:
    from kvtool.evaluation.bench.bench import Bench

_PER_DOUBLING = 4  # points of the curve


class Nlls(BaseModel):
    """What is recorded of a sample: negative log-likelihoods between edges, in tokens."""

    chunk: PositiveInt
    edges: Annotated[list[NonNegativeInt], Field(min_length=2)]
    nll: list[Number]
    tokens: list[PositiveInt]

    @model_validator(mode="after")
    def _one_between_edges(self) -> Nlls:
        if not len(self.nll) == len(self.tokens) == len(self.edges) - 1:
            raise ValueError("`nll` and `tokens` have one entry between two `edges`")
        return self


class Perplexity(Task):
    """Perplexity of documents, each cut to `lengths` tokens.

    Attributes:
        samples: documents per length.
        chunk: tokens fed at a time; by default one for policies that evict in every step, a block
            for those that cut a prompt.
        prompt: tokens read first as a prompt, cut like one and not scored; what follows is fed
            token by token, as it is generated.
        skip: tokens at the beginning that are not scored, in every variant.
        data: a text file, a dataset or a preset (`pg19`); the built-in text else.
    """

    lengths: Lengths = (1024,)
    samples: Samples = 5
    chunk: Tokens | None = None
    prompt: Tokens | None = None
    skip: Tokens = 1
    data: Data | None = None

    record: ClassVar[type[BaseModel]] = Nlls
    metric: ClassVar[str] = "ppl"
    best: ClassVar[float | None] = None
    lower_is_better: ClassVar[bool] = True

    @property
    def chat(self) -> bool:
        return False

    @property
    def _unscored(self) -> int:
        return max(self.skip, self.prompt or 0)

    @property
    def _leaves_none(self) -> str:
        name = "skip" if self._unscored == self.skip else "prompt"
        return f"{name} {self._unscored} leaves none"

    def samples_of(self, length: int, tokens: TokenCounter) -> Iterator[tuple[str, str]]:
        """Yield names and texts of at least `length` tokens, as far as there are any."""
        if self.data is None:
            for i in range(self.samples):
                yield str(i), recap_passage(self.name, self.seed, length, i, tokens)
            return
        texts, _ = documents(self.data, task=self.name)
        for name, text in texts[: self.samples]:
            yield name, tokens.decode(tokens.encode(text)[: length - tokens.special])

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        for length in self.lengths:
            if self._unscored >= length:
                raise UsageError(f"{self.name}: {self._leaves_none} of {length} tokens to score")
            for name, text in self.samples_of(length, tokens):
                yield Sample(f"length={length}/{name}", text, cell={"length": length})

    def run(self, bench: Bench, sample: Sample) -> Json:
        ids = bench.encode(sample.context, special=True)
        start = self._unscored
        if start >= ids.shape[1]:
            raise KvtoolError(f"the text has {ids.shape[1]} tokens, {self._leaves_none} to score")
        cache = bench.new_cache()
        if self.prompt is None:
            chunk = self.chunk or bench.chunk
            logprobs, _ = bench.follow(cache, ids, chunk=chunk)
        else:
            chunk = self.chunk or 1
            cache.expect_length(ids.shape[1])
            read, rest = ids[:, : self.prompt], ids[:, self.prompt :]
            logits = bench.feed_first(cache, read, new_tokens=rest.shape[1])
            logprobs, _ = bench.follow(cache, rest, chunk=chunk, first_logits=logits)
        scored = logprobs[0, start - ids.shape[1] :].double()
        edges = _edges(start, ids.shape[1])
        nll, count = [], []
        for low, high in itertools.pairwise(edges):
            part = scored[low - start : high - start]
            nll.append(-part.sum().item())
            count.append(len(part))
        return {"chunk": chunk, "edges": edges, "nll": nll, "tokens": count}

    def score(self, record: Json) -> dict[str, float]:
        nll = math.fsum(record["nll"]) / sum(record["tokens"])
        return {"ppl": LINKS["exp"](nll), "nll": nll}

    def summarise(self, records: Sequence[Json]) -> Summary:
        """Weigh documents by their scored tokens; the standard error is over documents."""
        plain = super().summarise(records)
        cells = []
        for cell, _ in plain.cells:
            members = [record for record in records if record.get("cell") == cell]
            cells.append((cell, _perplexity(members)))
        nll = _mean_nll(records)
        spread = mean([self.score(record)["nll"] for record in records])
        return Summary(
            metrics={
                "ppl": _perplexity(records),
                "nll": Statistic(nll, len(records), spread.stderr),
                "tokens": Statistic(float(sum(sum(r["tokens"]) for r in records)), len(records)),
                "chunk": Statistic(float(max(r["chunk"] for r in records)), len(records)),
            },
            cells=cells,
            curves={"nll by position": _curve(records)},
            parts=[(math.fsum(r["nll"]), float(sum(r["tokens"]))) for r in records],
            link="exp",
        )


def _edges(start: int, stop: int) -> list[int]:
    """Return positions from `start` to `stop`, evenly spaced in their logarithm."""
    steps = math.ceil(_PER_DOUBLING * math.log2(max(stop, 2)))
    marks = {round(2 ** (i / _PER_DOUBLING)) for i in range(steps + 1)}
    return [start, *sorted(mark for mark in marks if start < mark < stop), stop]


def _mean_nll(records: Sequence[Json]) -> float:
    return math.fsum(x for r in records for x in r["nll"]) / sum(sum(r["tokens"]) for r in records)


def _perplexity(records: Sequence[Json]) -> Statistic:
    """Return exp of the mean NLL over tokens; its error follows from that of the documents' NLL."""
    nlls = [math.fsum(record["nll"]) / sum(record["tokens"]) for record in records]
    value, spread = LINKS["exp"](_mean_nll(records)), mean(nlls).stderr
    return Statistic(value, len(records), None if spread is None else value * spread)


def _curve(records: Sequence[Json]) -> Curve:
    """Return the mean NLL of all tokens up to a position, over documents that reach it."""
    longest = max(records, key=lambda record: len(record["edges"]))["edges"]
    x, y = [], []
    total = count = 0.0
    for i, edge in enumerate(longest[1:]):
        reached = [r for r in records if len(r["edges"]) > i + 1 and r["edges"][i + 1] == edge]
        total += math.fsum(record["nll"][i] for record in reached)
        count += sum(record["tokens"][i] for record in reached)
        if count:
            x.append(float(edge))
            y.append(total / count)
    return Curve(x, y, "position (tokens)", "mean NLL so far (nats)")
