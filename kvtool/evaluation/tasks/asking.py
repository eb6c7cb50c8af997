"""Tasks that ask questions and compare answers with references.

Samples are drawn at given lengths, without data, or read from the rows of a file or of a dataset on
the hub.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import BaseModel, Field, NonNegativeInt

from kvtool.documents.results import Number
from kvtool.errors import UsageError
from kvtool.evaluation.metrics.text import string_match_all
from kvtool.evaluation.samples.data import PRESETS, Data, Rows, read_rows
from kvtool.evaluation.samples.data_files import Row
from kvtool.evaluation.samples.fit import Rng, fit, generator
from kvtool.evaluation.samples.questions import require
from kvtool.evaluation.samples.random_data import (
    STATISTICS,
    random_numbers,
    random_pairs,
    spread,
    units_for,
)
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.task import Lengths, Samples, Task, even_shares

if TYPE_CHECKING:
    from kvtool.documents.settings import Protocol
    from kvtool.evaluation.bench.bench import Bench


_SCORED = ("nll", "right_tokens")
_ROWS = 16  # of a batch, by default, where answers are long


class AskedTurn(BaseModel):
    """A question that was asked: the answer and the right ones.

    Where the right answer was scored, `nll` is the mean of its tokens in nats, and `right_tokens`
    are those before the first that was not the likeliest.
    """

    prediction: str
    references: Annotated[list[str], Field(min_length=1)]
    nll: Number | None = None
    right_tokens: NonNegativeInt | None = None


class Facts(BaseModel):
    """What a score needs beside the answers; the keys that tasks use."""

    protocol: str | None = None
    all_classes: list[str] | None = None
    kinds: list[str] | None = None
    functions: list[str] | None = None
    prefix: str | None = None
    abstain: bool | None = None


class AskedRecord(BaseModel):
    """What a task that asks has recorded of a sample."""

    turns: Annotated[list[AskedTurn], Field(min_length=1)]
    facts: Facts


class Asking(Task):
    """A task that asks and compares answers with references; subclasses score one answer."""

    record: ClassVar[type[BaseModel] | None] = AskedRecord
    one_answer: ClassVar[bool] = False  # that a right answer begins with, so that it can be scored

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return ()

    @property
    def min_new_tokens(self) -> int:
        """Tokens that an answer has at least."""
        return 0

    @property
    def same_context(self) -> bool:
        """Whether every question is asked of the same compressed context."""
        return False

    @property
    def after_references(self) -> bool:
        """Whether a turn follows the reference answer to the one before, not the model's own."""
        return False

    @property
    def enable_thinking(self) -> bool | None:
        """Whether the model thinks first, for chat templates with a switch; None: theirs."""
        return None

    @property
    def conversation(self) -> bool:
        """Whether a context is the JSON list of messages, of user and assistant in turn."""
        return False

    def knows_query(self, protocol: Protocol) -> bool:
        """Return whether the question is in the prompt that is compressed."""
        return not self.same_context and super().knows_query(protocol)

    @abstractmethod
    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Score one answer, from 0 to `best`."""

    @property
    def asks_once(self) -> bool:
        """Whether it asks each sample's questions once, and the likeliest tokens are the answer."""
        return type(self).run is Asking.run and not self.min_new_tokens

    def largest_batch(self, protocol: Protocol) -> int:
        scored = self.one_answer and protocol.answers == "scored"
        alone = protocol.shared_prefill or protocol.temperature or scored
        if alone or not (self.asks_once and self.knows_query(protocol)):
            return 1
        return protocol.batch or (_ROWS if self.reasons else 1)

    def run(self, bench: Bench, sample: Sample) -> Json:
        """Ask every turn."""
        from kvtool.evaluation.bench.ask import ask

        return {"turns": ask(bench, sample, self), "facts": sample.facts}

    def score(self, record: Json) -> dict[str, float]:
        """Return means over turns; of answers that were scored, more than the headline."""
        turns = record["turns"]
        scores = [
            self.score_answer(turn["prediction"], turn["references"], record["facts"])
            for turn in turns
        ]
        found = {self.metric: sum(scores) / len(turns)}
        for name in _SCORED:
            if all(turn.get(name) is not None for turn in turns):
                found[name] = sum(turn[name] for turn in turns) / len(turns)
        return found


Cell = dict[str, int | float | str]


def length_of(cell: Cell) -> int:
    """Return the tokens of a prompt and its longest answer."""
    return int(cell["length"])


class Drawn(Asking):
    """A task that draws its samples; each is the same whatever other samples are drawn.

    Attributes:
        samples: how many of each cell.
    """

    samples: Samples = 20

    def cells(self) -> Iterator[Cell]:
        """Return what the samples differ in: their `length`, or the `depth` of a chain."""
        name = "length" if hasattr(self, "lengths") else "depth"
        for value in getattr(self, f"{name}s"):
            yield {name: value}

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        """Draw `samples` of each cell.

        Raises:
            UsageError: a length that is too short for the task.
        """
        cells = list(self.cells())
        return self._draw(cells, [self.samples] * len(cells), tokens)

    def draw_some(self, tokens: TokenCounter, limit: int) -> list[Sample]:
        """Draw `limit` samples, spread over the cells."""
        cells = list(self.cells())
        return list(self._draw(cells, even_shares([self.samples] * len(cells), limit), tokens))

    def _draw(
        self, cells: Sequence[Cell], counts: Sequence[int], tokens: TokenCounter
    ) -> Iterator[Sample]:
        for cell, samples in zip(cells, counts, strict=True):
            for index in range(samples):
                rng = generator(self.seed, self.name, *cell.values(), index)
                place = "/".join(f"{name}={value}" for name, value in cell.items())
                yield self.draw_one(rng, f"{place}/{index}", cell, tokens)

    @abstractmethod
    def draw_one(self, rng: Rng, name: str, cell: Cell, tokens: TokenCounter) -> Sample:
        """Draw the sample that is called `name`."""


@dataclass(frozen=True)
class Draft:
    """A sample whose length is still open.

    Attributes:
        build: the context and the turns with the first n units (sentences, needles ..) as filler.
        weights: tokens of each unit, roughly.
        facts: of the sample.
    """

    build: Callable[[int], tuple[str, Sequence[Turn]]]
    weights: Sequence[int]
    facts: Json = field(default_factory=dict)

    def sample(self, name: str, cell: Cell, units: int) -> Sample:
        """Return the sample with some units of filler."""
        context, turns = self.build(units)
        return Sample(name, context, tuple(turns), cell, self.facts)


class Filled(Drawn):
    """A task whose samples are filled up to their length.

    Attributes:
        lengths: tokens of a prompt and the longest answer together.
    """

    lengths: Lengths = (1024,)

    @abstractmethod
    def draft(self, rng: Rng, cell: Cell, tokens: TokenCounter) -> Draft:
        """Draw a sample, with more filler than its length takes."""

    def draw_one(self, rng: Rng, name: str, cell: Cell, tokens: TokenCounter) -> Sample:
        """Draw a sample and fill it.

        Raises:
            UsageError: it is too long even without filler.
        """
        draft = self.draft(rng, cell, tokens)
        build = partial(draft.sample, name, cell)
        return fit(build, draft.weights, length_of(cell), tokens, self.name)


def pairs_draft(rng: Rng, count: int, cell: Cell, tokens: TokenCounter, new_tokens: int) -> Draft:
    """Ask for the values of `count` keys of a JSON object of random UUIDs."""
    asked, fractions = random_pairs(rng, count), rng.random(count)
    unit = tokens.count('"{}": "{}", '.format(*asked[0]))
    filler = random_pairs(rng, units_for(length_of(cell), unit))
    turns = [
        Turn(f'\n Question: What is the value of "{key}"? Answer:', (value,), new_tokens)
        for key, value in asked
    ]

    def build(units: int) -> tuple[str, Sequence[Turn]]:
        pairs = dict(spread(filler[:units], asked, fractions))
        return f" The values of a JSON object:\n{json.dumps(pairs)}", turns

    return Draft(build, [unit] * len(filler))


def list_draft(
    rng: Rng, kinds: Sequence[str], cell: Cell, tokens: TokenCounter, new_tokens: int
) -> Draft:
    """Ask for some of `STATISTICS` about a list of numbers."""
    unit = tokens.count(", 47, 52")
    numbers = random_numbers(rng, units_for(length_of(cell), unit))

    def build(units: int) -> tuple[str, Sequence[Turn]]:
        shown = numbers[: 5 + 2 * units]
        turns = [
            Turn(
                f"\n Question: What is the {kind} of the list? Answer:",
                (str(STATISTICS[kind](shown)),),
                new_tokens,
                f" The {kind} is:",
            )
            for kind in kinds
        ]
        return f" A list of numbers:\n{shown}", turns

    return Draft(build, [unit] * ((len(numbers) - 5) // 2))


class Ruler(Filled):
    """A task of RULER that is scored by the fraction of references in the answer.

    Hsieh et al., 2024, https://arxiv.org/abs/2404.06654. Lengths, numbers of needles and hops,
    haystacks, answer lengths and scores are RULER's. The wording is that of the bundled reference
    model without an instruction before the context, words and names are from its vocabulary, and
    the random numbers are our own. Scores mean the same as RULER's; digit by digit they differ.
    """

    metric: ClassVar[str] = "string_match_all"

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return the percentage of references that are part of the answer."""
        return 100 * string_match_all(prediction, references)


def given(task: Task, data: Data | None) -> Data:
    """Return the data of a task, or say which ones it needs."""
    if data is None:
        raise UsageError(f"task `{task.name}` needs {task.missing}")
    return data


class Read(Asking):
    """A task that reads its samples.

    Nothing is downloaded unless asked for: a suite leaves the task out as long as it has no data.

    Attributes:
        data: a file, a folder with the benchmark's file in it, or a dataset on the hub.
        samples: how many rows, from the first; all by default.
    """

    data: Data | None = None
    samples: Samples | None = None

    file: ClassVar[str | None] = None  # that a user has to give, where the hub has none

    @property
    def preset(self) -> str:
        """The name of the usual data: that of the suite."""
        return self.name.partition("/")[0]

    @property
    def part(self) -> str:
        """The name of the task without its suite."""
        return self.name.rpartition("/")[2]

    @property
    def missing(self) -> str | None:
        """Which data are needed."""
        if self.data is not None:
            return None
        if self.file is not None:
            return f"data: {self.file}"
        hub = PRESETS[self.preset]["hub"]
        return f"data: a file, or `{self.preset}` for {hub} on the hub"

    def on_hub(self, data: Data) -> Data:
        """Return the part of the benchmark's dataset on the hub that this task reads."""
        return data

    def read(self, columns: Sequence[str], stem: str) -> Rows:
        """Read the rows.

        Args:
            columns: what every row must have.
            stem: name of the task's file in a folder.

        Raises:
            UsageError: no data are given, or there is no such file.
            KvtoolError: data that cannot be read or lack a column.
        """
        data = given(self, self.data)
        own = PRESETS.get(self.preset, {}).get("hub")
        data = self.on_hub(data) if own and data.hub == own else data
        return read_rows(data, columns, task=self.name, stem=stem)

    def rows(
        self, columns: Sequence[str], stem: str, texts: Sequence[str] = ()
    ) -> Iterator[tuple[int, Row, str]]:
        """Read rows one by one, each with its number and what to call it in an error.

        Args:
            columns: what no row may lack.
            stem: name of the task's file in a folder.
            texts: those of them that hold a text.

        Raises:
            UsageError, KvtoolError: as `read`; a row that lacks something.
        """
        table = self.read(columns, stem)
        for number, row in enumerate(table.rows, 1):
            where = f"{self.name}: `{table.source}` row {number}"
            require(row, columns, where, texts)
            yield number, row, where


class ShortAnswer(Read):
    """A task that reads its samples and wants short answers, before which no model need think.

    Attributes:
        thinking: whether the model thinks before it answers, for chat templates that know
            `enable_thinking`; None leaves it to them. A thought needs more `max_new_tokens` than
            these tasks allow by themselves.
    """

    thinking: bool | None = False

    @property
    def enable_thinking(self) -> bool | None:
        return self.thinking
