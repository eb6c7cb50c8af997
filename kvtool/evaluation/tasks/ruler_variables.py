"""RULER's variable tracking: all variables that hold a value, handed on from one to the next.

Hsieh et al., 2024, https://arxiv.org/abs/2404.06654, section 3.2: one chain of four hops in noise;
see `Ruler` for what is our own. The wording asks for no calculation, so there is no worked example
before it. Names have two letters (five in RULER), which other words may contain: they must be
words of the answer, in capitals.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from kvtool.evaluation.metrics.contains import words_match_all
from kvtool.evaluation.samples.fit import fit
from kvtool.evaluation.samples.haystack import costs, haystack, insert
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.drawn import Cell, Ruler, length_of
from kvtool.models.reference.vocabulary import VARIABLES

_HOPS = 4
_NEW_TOKENS = 30
_SMALLEST, _LARGEST = 10_000, 99_998


class VariableTracking(Ruler):
    """Name the five variables that hold a value."""

    def draw_one(
        self, rng: np.random.Generator, name: str, cell: Cell, tokens: TokenCounter
    ) -> Sample:
        """Hide a chain of assignments in noise, in order."""
        length = length_of(cell)
        value = int(rng.integers(_SMALLEST, _LARGEST + 1))
        names = rng.choice(VARIABLES, _HOPS + 1, replace=False).tolist()
        depths = np.sort(rng.uniform(0, 100, len(names))).tolist()
        noise = haystack("noise").draw(rng, length)
        turn = Turn(
            f"\n Question: Which variables have the value {value}? Answer:",
            tuple(names),
            _NEW_TOKENS,
            f" The variables with the value {value}:",
        )

        def build(count: int) -> Sample:
            text = insert(noise[:count], assignments(value, names), depths, tokens)
            return Sample(name, "".join(text), (turn,), cell)

        return fit(build, costs(noise, tokens), length, tokens, self.name)

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return the percentage of names that are words of the answer."""
        return 100 * words_match_all(prediction, references)


def assignments(value: int, names: Sequence[str]) -> list[str]:
    """State that a value goes to the first name and from each name on to the next.

    >>> assignments(48213, ["BA", "CE"])
    [' The value 48213: BA.', ' The value from BA: CE.']
    """
    first = f" The value {value}: {names[0]}."
    return [first, *(f" The value from {a}: {b}." for a, b in itertools.pairwise(names))]
