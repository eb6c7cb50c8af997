"""Tasks whose samples are drawn at given lengths, so that they need no data."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from kvtool.evaluation.metrics.contains import string_match_all
from kvtool.evaluation.samples.fit import generator
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter
from kvtool.evaluation.tasks.asking import Asking
from kvtool.evaluation.tasks.settings import Lengths, Samples

Cell = dict[str, int | float | str]


def length_of(cell: Cell) -> int:
    """Return the tokens of a prompt and its longest answer."""
    return int(cell["length"])


class Drawn(Asking):
    """A task that draws its samples; each is the same whatever other samples are drawn.

    Attributes:
        lengths: tokens of a prompt and the longest answer together.
        samples: how many of each cell.
    """

    lengths: Lengths = (1024,)
    samples: Samples = 20

    def cells(self) -> Iterator[Cell]:
        """Return what the samples differ in; the `length` is among it."""
        for length in self.lengths:
            yield {"length": length}

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        """Draw `samples` of each cell.

        Raises:
            UsageError: a length that is too short for the task.
        """
        for cell in self.cells():
            for index in range(self.samples):
                rng = generator(self.seed, self.name, *cell.values(), index)
                place = "/".join(f"{name}={value}" for name, value in cell.items())
                yield self.draw_one(rng, f"{place}/{index}", cell, tokens)

    @abstractmethod
    def draw_one(
        self, rng: np.random.Generator, name: str, cell: Cell, tokens: TokenCounter
    ) -> Sample:
        """Draw the sample that is called `name`."""


class Ruler(Drawn):
    """A task of RULER that is scored by the fraction of references in the answer.

    Hsieh et al., 2024, https://arxiv.org/abs/2404.06654. Lengths, numbers of needles and hops,
    haystacks, answer lengths and scores are RULER's. The wording is that of the bundled reference
    model without an instruction before the context, words and names are from its vocabulary, and
    the random numbers are our own: scores mean the same as RULER's, digit by digit they differ.
    """

    metric: ClassVar[str] = "string_match_all"

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return the percentage of references that are part of the answer."""
        return 100 * string_match_all(prediction, references)
