"""The base of all tasks: samples, a measurement of each, and scores from the records.

A task is a frozen pydantic model whose fields are its settings, so that a recipe, the command line
and Python configure it alike. `run` needs a model and gives a record of JSON values; `score` and
`summarise` need only records, so that scores can be made anew from a run's files. Types of settings
that tasks share, and the names and globs that a user types, are read here.
"""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt

from kvtool.documents.document import TokenCount
from kvtool.evaluation.metrics.summary import Summary, mean
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter
from kvtool.sizes import LARGEST_SEED, parse_count

if TYPE_CHECKING:
    from kvtool.documents.settings import Protocol
    from kvtool.evaluation.bench.bench import Bench


Place = Mapping[str, int | float | str]
"""A cell of the tables, such as one length and depth."""


class Task(BaseModel, ABC):
    """A benchmark. Fields are settings; a subclass says below what it measures.

    Attributes:
        metric: the headline score.
        droppable: whether a loss in percent of the full cache's headline means something.
        right_answers: whether answers are compared with right ones, not with the full cache's.
        record: the keys of a record that `score` needs; None: only the task itself knows.
        reasons: whether an answer is a chain of steps, each of which needs earlier ones.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    seed: Annotated[NonNegativeInt, Field(le=LARGEST_SEED)] = 0

    metric: ClassVar[str]
    droppable: ClassVar[bool] = True
    right_answers: ClassVar[bool] = True
    query_aware: ClassVar[bool] = True
    reasons: ClassVar[bool] = False
    record: ClassVar[type[BaseModel] | None] = None

    @property
    def version(self) -> int:
        """A number that rises whenever samples, prompt or score change."""
        return 1

    @property
    def best(self) -> float | None:
        """The value of a perfect score; None where there is none (a perplexity)."""
        return 100.0

    @property
    def lower_is_better(self) -> bool:
        """Whether a smaller headline is a better one."""
        return False

    @property
    def extra(self) -> str | None:
        """The optional dependency group without which the task cannot run."""
        return None

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

    def draw_some(self, tokens: TokenCounter, limit: int) -> list[Sample]:
        """Draw or read `limit` samples, spread over lengths and depths; of one, the first ones."""
        samples = self.draw(tokens)
        if all(len(getattr(self, name, None) or ()) < 2 for name in ("lengths", "depths")):
            return list(islice(samples, limit))
        cells = [list(cell) for _, cell in groupby(samples, lambda sample: sample.cell)]
        shares = even_shares([len(cell) for cell in cells], limit)
        return [sample for cell, n in zip(cells, shares, strict=True) for sample in cell[:n]]

    def knows_query(self, protocol: Protocol) -> bool:
        """Return whether the question is in the prompt that is compressed."""
        return self.query_aware if protocol.query_aware is None else protocol.query_aware

    def keeps_question(self, protocol: Protocol) -> bool:
        """Return whether a question that is not in that prompt is kept whole."""
        return protocol.keep_question and not self.knows_query(protocol)

    def largest_batch(self, protocol: Protocol) -> int:
        """Return how many samples' answers are decoded in one batch at most."""
        return 1

    def work(self, sample: Sample) -> int:
        """Return how long a sample takes beside those of other tasks, roughly: its characters."""
        return 1 + len(sample.context) + sum(len(turn.question) for turn in sample.turns)

    @abstractmethod
    def run(self, bench: Bench, sample: Sample) -> Json:
        """Measure one sample; JSON values, whatever the score needs included."""

    def measure(self, bench: Bench, sample: Sample) -> Json:
        """Run one sample; return what is recorded, with its `cost`."""
        bench.restart_meter()
        try:
            return {**self.run(bench, sample), "cost": bench.meter.record()}
        finally:
            bench.forget_contexts()

    @abstractmethod
    def score(self, record: Json) -> dict[str, float]:
        """Score one record; the headline `metric` is among the names."""

    def places(self, cell: Place) -> list[Place]:
        """Return the cells of the tables that a sample counts in: its own, if it has one."""
        return [cell] if cell else []

    def summarise(self, records: Sequence[Json]) -> Summary:
        """Put the scored records of one variant together: means and standard errors."""
        scores = [self.score(record) for record in records]
        cells: dict[tuple, list[float]] = defaultdict(list)
        for record, score in zip(records, scores, strict=True):
            for place in self.places(record.get("cell") or {}):
                cells[tuple(place.items())].append(score[self.metric])
        names = dict.fromkeys(name for score in scores for name in score)
        return Summary(
            metrics={
                name: mean([score[name] for score in scores if name in score]) for name in names
            },
            cells=[(dict(cell), mean(cells[cell])) for cell in sorted(cells, key=_order)],
            parts=[(score[self.metric], 1.0) for score in scores if self.metric in score],
        )


def even_shares(sizes: Sequence[int], limit: int) -> list[int]:
    """Return how many samples each cell gives to a run of `limit`, as evenly as their sizes allow.

    >>> even_shares([20, 20, 1], 6)
    [3, 2, 1]
    >>> even_shares([9, 9, 9, 9, 9], 2)
    [0, 1, 0, 1, 0]
    """
    shares = [0] * len(sizes)
    left = min(limit, sum(sizes))
    while left:
        more = [cell for cell, size in enumerate(sizes) if shares[cell] < size]
        taken = min(left, len(more))
        for i in range(taken):
            shares[more[(2 * i + 1) * len(more) // (2 * taken)]] += 1
        left -= taken
    return shares


def _order(cell: tuple[tuple[str, Any], ...]) -> list[tuple]:
    """Sort cells by their values, numbers before texts."""
    return [(name, isinstance(value, str), value) for name, value in cell]


def covers(pattern: str, task: str) -> bool:
    """Match a task with a task, a suite or a glob.

    >>> covers("ruler", "ruler/vt"), covers("ruler/niah_*", "ruler/vt")
    (True, False)
    """
    return fnmatch.fnmatch(task, pattern) or task.startswith(f"{pattern}/")


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

Tokens = Annotated[TokenCount, BeforeValidator(_count)]
"""A number of tokens: `4096` or `4K`."""

Lengths = Annotated[tuple[TokenCount, ...], Field(max_length=1000), BeforeValidator(_counts)]
"""Numbers of tokens: `[1K, 4K]`, `1K,4K` or one of them; each counts once."""
