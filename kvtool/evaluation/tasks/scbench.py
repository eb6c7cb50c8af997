"""SCBench: up to five questions about one context, here the four tasks that need no data file.

Li et al., 2024, https://arxiv.org/abs/2412.10319; https://github.com/microsoft/MInference, folder
scbench. Questions come one after the other in the same cache (`multi_turn`) or each anew from the
compressed context (`scdq`: same context, different queries).

Differences: samples are drawn, at any length, not read, and worded by us. `mf` draws two-digit
numbers. `vt` hides its chains in prose and words them as the bundled model knows them. Its variable
names have two letters, so they count as whole words, not anywhere in the answer.
"""

from __future__ import annotations

import itertools
import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from kvtool.errors import UsageError
from kvtool.evaluation.metrics.maths import first_number
from kvtool.evaluation.metrics.text import words_match_all
from kvtool.evaluation.samples.fit import longest
from kvtool.evaluation.samples.haystack import costs, haystack, insert
from kvtool.evaluation.samples.random_data import (
    STATISTICS,
    random_numbers,
    random_pairs,
    random_string,
    spread,
    units_for,
)
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import Asking, Cell, Drawn, length_of
from kvtool.evaluation.tasks.task import Samples
from kvtool.models.reference.vocabulary import VARIABLES

_ENDS = 3  # characters of a prefix and of a suffix
_HOLDERS = 5  # variables that a value passes through
_FEWEST_CHAINS = 3


class SharedContext(Asking):
    """Several questions about one context; the score is the mean over them.

    Attributes:
        turns: questions for each context.
        mode: `multi_turn` asks them in one conversation, `scdq` each of the context alone.
        golden: whether a turn sees the right answer to the turn before, not the model's own.
    """

    turns: int = Field(default=5, ge=1, le=5)
    mode: Literal["multi_turn", "scdq"] = "multi_turn"
    golden: bool = True

    @property
    def same_context(self) -> bool:
        """Whether every question is asked of the same compressed context."""
        return self.mode == "scdq"

    @property
    def after_references(self) -> bool:
        """Whether a turn follows the reference answer to the one before, not the model's own."""
        return self.golden

    def needed_tokens(self, sample: Sample, tokens: TokenCounter) -> int:
        """Return the tokens of the longest prompt with its longest answer."""
        asked = [tokens.count(turn.question + turn.answer_prefix) for turn in sample.turns]
        new = [turn.max_new_tokens for turn in sample.turns]
        read = tokens.special + tokens.count(sample.context)
        if self.same_context:
            return read + max(np.add(asked, new).tolist())
        said = [tokens.count(" " + turn.references[0]) for turn in sample.turns]
        before = np.cumsum([0, *np.add(asked, said if self.golden else new)[:-1]])
        return read + max((before + asked + new).tolist())


@dataclass(frozen=True)
class Draft:
    """A sample whose length is still open.

    Attributes:
        build: the context and the turns with the first n units of filler.
        weights: tokens of each unit, roughly.
    """

    build: Callable[[int], tuple[str, Sequence[Turn]]]
    weights: Sequence[int]


class DrawnContext(SharedContext, Drawn):
    """A task whose contexts are drawn to a length.

    Attributes:
        lengths: tokens of the longest prompt with its answer, all turns included.
        samples: contexts of each length.
    """

    samples: Samples = 10

    metric: ClassVar[str] = "accuracy"

    @abstractmethod
    def draft(self, rng: np.random.Generator, length: int, tokens: TokenCounter) -> Draft:
        """Draw a sample with filler for more than `length` tokens."""

    def draw_one(
        self, rng: np.random.Generator, name: str, cell: Cell, tokens: TokenCounter
    ) -> Sample:
        """Draw a sample and fill it to its length.

        Raises:
            UsageError: the questions alone do not fit in.
        """
        length = length_of(cell)
        draft = self.draft(rng, length, tokens)

        def build(units: int) -> Sample:
            context, turns = draft.build(units)
            return Sample(name, context, tuple(turns), cell)

        def needed(units: int) -> int:
            return self.needed_tokens(build(units), tokens)

        least = needed(0)
        if least > length:
            fewer = ", or fewer turns" if self.turns > 1 else ""
            raise UsageError(
                f"{self.name}: length {length} is too short, "
                f"a sample of {self.turns} turns takes {least} tokens without filler",
                hint=f"use lengths of {least} or more{fewer}",
            )
        return build(longest(needed, draft.weights, length))


class KeyValue(DrawnContext):
    """`kv`: the values of some keys of a JSON object of random UUIDs."""

    def draft(self, rng: np.random.Generator, length: int, tokens: TokenCounter) -> Draft:
        asked, fractions = random_pairs(rng, self.turns), rng.random(self.turns)
        unit = tokens.count('"{}": "{}", '.format(*asked[0]))
        filler = random_pairs(rng, units_for(length, unit))
        turns = [
            Turn(f'\n Question: What is the value of "{key}"? Answer:', (value,), 150)
            for key, value in asked
        ]

        def build(units: int) -> tuple[str, Sequence[Turn]]:
            pairs = dict(spread(filler[:units], asked, fractions))
            return f" The values of a JSON object:\n{json.dumps(pairs)}", turns

        return Draft(build, [unit] * len(filler))

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        return 100.0 * (references[0] in prediction)


class PrefixSuffix(DrawnContext):
    """`prefix_suffix`: of many random strings, the one that begins and ends in a given way."""

    def draft(self, rng: np.random.Generator, length: int, tokens: TokenCounter) -> Draft:
        asked: dict[tuple[str, str], str] = {}
        while len(asked) < self.turns:
            text = _string(rng)
            asked[_ends(text)] = text
        fractions = rng.random(self.turns)
        unit = tokens.count(f"{text}, ")
        drawn = [_string(rng) for _ in range(units_for(length, unit))]
        filler = [text for text in drawn if _ends(text) not in asked]
        turns = [
            Turn(
                f'\n Question: Which string begins with "{prefix}" and ends with "{suffix}"? '
                "Answer:",
                (text,),
                150,
                " The string is:",
            )
            for (prefix, suffix), text in asked.items()
        ]

        def build(units: int) -> tuple[str, Sequence[Turn]]:
            strings = spread(filler[:units], list(asked.values()), fractions)
            return f" A list of strings:\n{', '.join(strings)}", turns

        return Draft(build, [unit] * len(filler))

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        return 100.0 * (references[0] in prediction)


class Variables(DrawnContext):
    """`vt`: values that pass from variable to variable; all the holders of one value."""

    metric: ClassVar[str] = "string_match_all"

    def draft(self, rng: np.random.Generator, length: int, tokens: TokenCounter) -> Draft:
        count = max(_FEWEST_CHAINS, self.turns)
        values = rng.choice(np.arange(10_000, 100_000), count, replace=False).tolist()
        chains = rng.choice(VARIABLES, (count, _HOLDERS), replace=False).tolist()
        facts = [
            fact
            for value, names in zip(values, chains, strict=True)
            for fact in _pass(value, names)
        ]
        depths = np.sort(rng.uniform(0, 100, (count, _HOLDERS)), axis=1).ravel().tolist()
        filler = haystack().draw(rng, length)
        turns = [
            Turn(
                f"\n Question: Which variables have the value {value}? Answer:",
                (" ".join(names),),
                30,
                f" The variables with the value {value}:",
            )
            for value, names in zip(values, chains, strict=True)
        ]

        def build(units: int) -> tuple[str, Sequence[Turn]]:
            return "".join(insert(filler[:units], facts, depths, tokens)), turns[: self.turns]

        return Draft(build, costs(filler, tokens))

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        return 100.0 * round(words_match_all(prediction, references[0].split()), 2)


class MathFind(DrawnContext):
    """`mf`: the largest, smallest and median of a long list of numbers, and second places."""

    def draft(self, rng: np.random.Generator, length: int, tokens: TokenCounter) -> Draft:
        kinds = rng.permutation(list(STATISTICS)).tolist()[: self.turns]
        unit = tokens.count(", 47, 52")
        numbers = random_numbers(rng, units_for(length, unit))

        def build(units: int) -> tuple[str, Sequence[Turn]]:
            shown = numbers[: 5 + 2 * units]
            turns = [
                Turn(
                    f"\n Question: What is the {kind} of the list? Answer:",
                    (str(STATISTICS[kind](shown)),),
                    5,
                    f" The {kind} is:",
                )
                for kind in kinds
            ]
            return f" A list of numbers:\n{shown}", turns

        return Draft(build, [unit] * ((len(numbers) - 5) // 2))

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        return 100.0 * (first_number(prediction) == references[0])


def _string(rng: np.random.Generator) -> str:
    return random_string(rng, 16, 24)


def _ends(text: str) -> tuple[str, str]:
    return text[:_ENDS], text[-_ENDS:]


def _pass(value: int, names: Sequence[str]) -> list[str]:
    """Say which variable a value is given to, and where it goes on to from each."""
    hops = itertools.pairwise(names)
    return [f" The value {value}: {names[0]}."] + [
        f" The value from {source}: {to}." for source, to in hops
    ]
