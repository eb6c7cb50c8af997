"""What a benchmark is: samples, a measurement of each, and scores from what was recorded.

A task is a frozen pydantic model whose fields are its settings, so that a recipe, the command line
and Python configure it alike. `run` needs a model and gives a record of JSON values; `score` and
`summarise` need only records, so that scores can be made anew from a run's files.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt

from kvtool.sizes import LARGEST_SEED, MOST_TOKENS, parse_count

if TYPE_CHECKING:
    from kvtool.evaluation.bench.bench import Bench

Json = dict[str, Any]


def _count(value: Any) -> Any:
    return parse_count(value) if isinstance(value, str) else value


def _counts(value: Any) -> Any:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)):
        parts = [parts]
    counts = [_count(part) for part in parts]
    try:
        return list(dict.fromkeys(counts))
    except TypeError:  # a list or mapping among them, which the type refuses
        return counts


Samples = Annotated[PositiveInt, Field(le=1_000_000)]
"""How many samples of a kind a task has."""

Tokens = Annotated[PositiveInt, Field(le=MOST_TOKENS), BeforeValidator(_count)]
"""A number of tokens: `4096` or `4K`."""

Lengths = Annotated[
    tuple[Annotated[PositiveInt, Field(le=MOST_TOKENS)], ...],
    Field(max_length=1000),
    BeforeValidator(_counts),
]
"""Numbers of tokens: `[1K, 4K]`, `1K,4K` or one of them; each counts once."""


@dataclass(frozen=True)
class Turn:
    """A question and its answers.

    Attributes:
        question: what follows the context (or the turn before), up to where the answer begins.
        references: the right answers; what they mean together is the task's affair.
        max_new_tokens: where the answer is cut off.
        answer_prefix: the beginning of the answer that the model is given. It directly follows the
            question, or the assistant's header where a chat template is used.
    """

    question: str
    references: tuple[str, ...]
    max_new_tokens: int
    answer_prefix: str = ""


@dataclass(frozen=True)
class Sample:
    """One context and what is asked about it.

    Attributes:
        id: tells the sample from the others of its task.
        context: read first; compressed before the question is known if queries are unknown.
        turns: asked one after the other; mostly one.
        cell: where the sample belongs in the tables (`{"length": 4096, "depth": 50}`).
        facts: further JSON values that the score needs (`{"all_classes": [..]}`).
    """

    id: str
    context: str
    turns: tuple[Turn, ...] = ()
    cell: Mapping[str, int | float | str] = field(default_factory=dict)
    facts: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Statistic:
    """A number over samples; `stderr` is its standard error, None where it has none."""

    value: float
    n: int
    stderr: float | None = None


@dataclass(frozen=True)
class Curve:
    """A named line for a picture, such as the NLL against the position."""

    x: Sequence[float]
    y: Sequence[float]
    x_label: str
    y_label: str


@dataclass(frozen=True)
class Summary:
    """What a task says about one arm.

    Attributes:
        metrics: every score by name; the headline is the task's `metric`.
        cells: the headline per cell.
        curves: lines for pictures.
    """

    metrics: dict[str, Statistic]
    cells: list[tuple[Mapping[str, int | float | str], Statistic]] = field(default_factory=list)
    curves: dict[str, Curve] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenCounter:
    """How a tokenizer measures text.

    Attributes:
        encode: text to token ids, without special tokens.
        decode: token ids to text.
        limit: positions that the model was trained for, None if it does not say.
        special: tokens that a prompt gets on top of its text (`<bos>` ..).
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    limit: int | None = None
    special: int = 1

    def count(self, text: str) -> int:
        """Return the tokens of a text, special ones excluded."""
        return len(self.encode(text))


class Task(BaseModel, ABC):
    """A benchmark. Fields are settings; a subclass says below what it measures.

    Attributes:
        version: bumped whenever samples, prompt or score change.
        metric: the headline score.
        best: the value of a perfect score; None where there is none (a perplexity).
        lower_is_better: whether a smaller headline is a better one.
        droppable: whether a loss in percent of the full cache's headline means something.
        extra: the optional dependency group without which the task cannot run.
        record: the keys of a record that `score` needs; None: only the task itself knows.
        chat: whether a chat template may go around the prompt.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    seed: Annotated[NonNegativeInt, Field(le=LARGEST_SEED)] = 0

    version: ClassVar[int] = 1
    metric: ClassVar[str]
    best: ClassVar[float | None] = 100.0
    lower_is_better: ClassVar[bool] = False
    droppable: ClassVar[bool] = True
    extra: ClassVar[str | None] = None
    query_aware: ClassVar[bool] = True
    record: ClassVar[type[BaseModel] | None] = None

    @property
    def chat(self) -> bool:
        """Whether a chat template may go around the prompt."""
        return True

    @property
    def protocol(self) -> str:
        """Whose prompts and rules these are."""
        return "kvtool"

    @property
    def missing(self) -> str | None:
        """What must be given before the task can run, in words; None if nothing."""
        return None

    @abstractmethod
    def draw(self, tokens: TokenCounter) -> Iterable[Sample]:
        """Draw or read the samples, always the same ones for the same settings.

        Raises:
            KvtoolError: settings that give no sample, data that lack a column.
        """

    def work(self, sample: Sample) -> int:
        """Return how long a sample takes beside those of other tasks, roughly: its characters."""
        return 1 + len(sample.context) + sum(len(turn.question) for turn in sample.turns)

    @abstractmethod
    def run(self, bench: Bench, sample: Sample) -> Json:
        """Measure one sample; JSON values, whatever the score needs included."""

    @abstractmethod
    def score(self, record: Json) -> dict[str, float]:
        """Score one record; the headline `metric` is among the names."""

    def summarise(self, records: Sequence[Json]) -> Summary:
        """Put the scored records of one arm together: means and standard errors."""
        scores = [self.score(record) for record in records]
        cells: dict[tuple, list[float]] = defaultdict(list)
        for record, score in zip(records, scores, strict=True):
            if record.get("cell"):
                cells[tuple(record["cell"].items())].append(score[self.metric])
        names = dict.fromkeys(name for score in scores for name in score)
        return Summary(
            metrics={
                name: mean([score[name] for score in scores if name in score]) for name in names
            },
            cells=[(dict(cell), mean(cells[cell])) for cell in sorted(cells, key=_order)],
        )


def _order(cell: tuple[tuple[str, Any], ...]) -> list[tuple]:
    """Sort cells by their values, numbers before texts."""
    return [(name, isinstance(value, str), value) for name, value in cell]


class AskedTurn(BaseModel):
    """A question that was asked: the answer and the right ones."""

    prediction: str
    references: Annotated[list[str], Field(min_length=1)]


class Facts(BaseModel):
    """What a score needs beside the answers; the keys that tasks use."""

    protocol: str | None = None
    all_classes: list[str] | None = None
    kinds: list[str] | None = None
    functions: list[str] | None = None


class AskedRecord(BaseModel):
    """What a task that asks has recorded of a sample."""

    turns: Annotated[list[AskedTurn], Field(min_length=1)]
    facts: Facts


class Asking(Task):
    """A task that asks and compares answers with references; subclasses score one answer."""

    record: ClassVar[type[BaseModel] | None] = AskedRecord

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return ()

    @property
    def min_new_tokens(self) -> int:
        """Tokens that an answer has at least."""
        return 0

    @abstractmethod
    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Score one answer, from 0 to `best`."""

    def run(self, bench: Bench, sample: Sample) -> Json:
        """Ask every turn."""
        return {"turns": bench.ask(sample, self), "facts": sample.facts}

    def score(self, record: Json) -> dict[str, float]:
        """Return the mean over turns."""
        turns = [
            self.score_answer(turn["prediction"], turn["references"], record["facts"])
            for turn in record["turns"]
        ]
        return {self.metric: sum(turns) / len(turns)}


def mean(values: Sequence[float]) -> Statistic:
    """Return the mean with its standard error, from the sample variance.

    >>> mean([0.0, 1.0, 1.0, 0.0])
    Statistic(value=0.5, n=4, stderr=0.28867513459481287)
    """
    n = len(values)
    centre = math.fsum(values) / n
    if n < 2:
        return Statistic(centre, n)
    variance = math.fsum((value - centre) ** 2 for value in values) / (n - 1)
    return Statistic(centre, n, math.sqrt(variance / n))
