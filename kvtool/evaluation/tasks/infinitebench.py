"""InfiniteBench's tasks that need no data: drawn at any length.

Zhang et al., 2024, https://arxiv.org/abs/2402.13718; https://github.com/OpenBMB/InfiniteBench.
Answer lengths and scores are the benchmark's.

Differences: samples are drawn, not read, and worded by us; the two needle tasks as the bundled
reference model knows them. `math_find` and `math_calc` use numbers of at most two digits, and no
step of a calculation falls below 0, since the score reads digits without a sign. A `math_calc`
answer may take as many tokens as the right one and a few more, not always 30,000. `code_run` takes
shallower calls where a length is too short for deep ones.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.evaluation.metrics.maths import (
    first_digits,
    first_number,
    last_integer,
    leading_share,
    words_of,
)
from kvtool.evaluation.samples import needles
from kvtool.evaluation.samples.fit import fit
from kvtool.evaluation.samples.haystack import costs, haystack, insert
from kvtool.evaluation.samples.random_data import (
    STATISTICS,
    random_calculation,
    random_numbers,
    random_pairs,
    spread,
    units_for,
)
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import Cell, Drawn, length_of

_LARGEST_ADDED = 9


@dataclass(frozen=True)
class Function:
    """A function of `code_run`: it adds a number to its argument or to what another returns.

    Attributes:
        name: of `func_NAME`.
        calls: the name of the other function, None if it calls none.
        added: other than 0.
    """

    name: int
    calls: int | None
    added: int

    def __str__(self) -> str:
        inner = "x" if self.calls is None else f"func_{self.calls}(x)"
        sign = "+" if self.added > 0 else "-"
        return f"def func_{self.name}(x):\n    return {inner} {sign} {abs(self.added)}\n"


def call_chain(rng: np.random.Generator, names: Sequence[int]) -> list[Function]:
    """Draw functions that each call the next."""
    callees = [*names[1:], None]
    return [Function(name, calls, _added(rng)) for name, calls in zip(names, callees, strict=True)]


def unrelated_functions(
    rng: np.random.Generator, names: Sequence[int], deepest: int
) -> list[Function]:
    """Draw functions that call earlier ones of the list, or none.

    Args:
        deepest: functions that a call goes through at most.
    """
    functions: list[Function] = []
    depths: list[int] = []
    for name in names:
        callee = int(rng.integers(-1, len(functions)))
        if callee < 0 or depths[callee] == deepest:
            functions.append(Function(name, None, _added(rng)))
            depths.append(1)
        else:
            functions.append(Function(name, functions[callee].name, _added(rng)))
            depths.append(depths[callee] + 1)
    return functions


def _added(rng: np.random.Generator) -> int:
    size = int(rng.integers(1, _LARGEST_ADDED + 1))
    return size if rng.random() < 0.5 else -size


_SPARE = 8  # tokens that a calculation may take beyond the right answer
_DEEPEST = 10  # functions that one call goes through
_LARGEST_ARGUMENT = 20


class HiddenNumber(Drawn):
    """Find a number that is stated twice in the same few sentences, said over and over."""

    metric: ClassVar[str] = "accuracy"

    @abstractmethod
    def plant(self, rng: np.random.Generator) -> tuple[str, int]:
        """Draw the number and say how many tokens an answer may have."""

    def draw_one(
        self, rng: np.random.Generator, name: str, cell: Cell, tokens: TokenCounter
    ) -> Sample:
        """Hide one number."""
        (key,), (number, new) = needles.draw_keys(rng, 1), self.plant(rng)
        turn, needle = needles.ask([key], [number], new), 2 * needles.state(key, number)
        sentences = haystack("noise").draw(rng, length_of(cell))
        depth = rng.uniform(0, 100)

        def build(count: int) -> Sample:
            text = insert(sentences[:count], [needle], [depth], tokens)
            return Sample(name, "".join(text), (turn,), cell)

        return fit(build, costs(sentences, tokens), length_of(cell), tokens, self.name)

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return 100 if the first digits are the number, else 0."""
        return 100.0 * (first_digits(prediction) == references[0])


class PassKeyRetrieval(HiddenNumber):
    """`passkey`: a number of five digits."""

    def plant(self, rng: np.random.Generator) -> tuple[str, int]:
        """Draw five digits."""
        return "".join(map(str, rng.integers(0, 10, 5).tolist())), 6


class NumberRetrieval(HiddenNumber):
    """`number_string`: ten digits, each written twice in a row."""

    def plant(self, rng: np.random.Generator) -> tuple[str, int]:
        """Draw five digits and double each."""
        return "".join(2 * str(digit) for digit in rng.integers(0, 10, 5).tolist()), 12


class KeyValueRetrieval(Drawn):
    """`kv_retrieval`: the value of one key of a JSON object of random UUIDs."""

    metric: ClassVar[str] = "accuracy"

    def draw_one(
        self, rng: np.random.Generator, name: str, cell: Cell, tokens: TokenCounter
    ) -> Sample:
        """Hide one pair among others."""
        ((key, value),) = asked = random_pairs(rng, 1)
        fraction = rng.random()
        unit = tokens.count(f'"{key}": "{value}", ')
        filler = random_pairs(rng, units_for(length_of(cell), unit))
        turn = Turn(f'\n Question: What is the value of "{key}"? Answer:', (value,), 50)

        def build(count: int) -> Sample:
            pairs = json.dumps(dict(spread(filler[:count], asked, [fraction])))
            return Sample(name, f" The values of a JSON object:\n{pairs}", (turn,), cell)

        return fit(build, [unit] * len(filler), length_of(cell), tokens, self.name)

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return 100 if the value is a word of the answer, punctuation aside, else 0."""
        return 100.0 * (references[0] in words_of(prediction))


class MathFindNumber(Drawn):
    """`math_find`: the largest or smallest number of a list, the second one, or the median."""

    metric: ClassVar[str] = "accuracy"

    def draw_one(
        self, rng: np.random.Generator, name: str, cell: Cell, tokens: TokenCounter
    ) -> Sample:
        """Draw a list and what is asked about it."""
        kind = rng.choice(list(STATISTICS)).item()
        unit = tokens.count(", 47, 52")
        numbers = random_numbers(rng, units_for(length_of(cell), unit))
        question = f"\n Question: What is the {kind} of the list? Answer:"

        def build(count: int) -> Sample:
            shown = numbers[: 5 + 2 * count]
            turn = Turn(question, (str(STATISTICS[kind](shown)),), 3, f" The {kind} is:")
            return Sample(name, f" A list of numbers:\n{shown}", (turn,), cell)

        weights = [unit] * ((len(numbers) - 5) // 2)
        return fit(build, weights, length_of(cell), tokens, self.name)

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return 100 if the first number is the right one, else 0."""
        return 100.0 * (first_number(prediction) == references[0])


class MathCalculation(Drawn):
    """`math_calc`: the value after every step of a long calculation.

    The score is the fraction of values before the first wrong one.
    """

    metric: ClassVar[str] = "leading_share"

    def draw_one(
        self, rng: np.random.Generator, name: str, cell: Cell, tokens: TokenCounter
    ) -> Sample:
        """Draw a calculation."""
        unit = tokens.count(" + 47") + tokens.count(", 52")
        steps, values = random_calculation(rng, units_for(length_of(cell), unit))

        def build(count: int) -> Sample:
            answer = ", ".join(map(str, values[: 2 + count]))
            context = (
                " The value after every step of a calculation.\n"
                f"Calculation: 12 + 5 - 9\nValues: 12, 17, 8\n"
                f"Calculation: {' '.join(steps[: 2 + count])}"
            )
            new = min(30_000, tokens.count(f" {answer}") + _SPARE)
            return Sample(name, context, (Turn("\nValues:", (answer,), new),), cell)

        return fit(build, [unit] * (len(steps) - 2), length_of(cell), tokens, self.name)

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return the percentage of values before the first wrong one."""
        return 100 * leading_share(prediction, re.findall("[0-9]+", references[0]))


class CodeRun(Drawn):
    """`code_run`: what a function returns that calls another, and that one the next."""

    metric: ClassVar[str] = "accuracy"

    def draw_one(
        self, rng: np.random.Generator, name: str, cell: Cell, tokens: TokenCounter
    ) -> Sample:
        """Draw the functions that are called and others around them."""
        unit = tokens.count(str(Function(17, 38, 5)))
        deepest = min(_DEEPEST, max(2, length_of(cell) // (2 * unit)))
        depth, argument = int(rng.integers(2, deepest + 1)), int(rng.integers(_LARGEST_ARGUMENT))
        others = units_for(length_of(cell), unit)
        names = rng.permutation(others + depth).tolist()
        chain = call_chain(rng, names[:depth])
        filler = unrelated_functions(rng, names[depth:], _DEEPEST)
        fractions = rng.random(depth)
        call = f"func_{chain[0].name}({argument})"
        turn = Turn(
            f"\n Question: What does {call} return? Answer:",
            (str(argument + sum(function.added for function in chain)),),
            5,
            f" {call} returns",
        )

        def build(count: int) -> Sample:
            code = "\n".join(map(str, spread(filler[:count], chain, fractions)))
            return Sample(name, f" Some functions in Python:\n{code}", (turn,), cell)

        return fit(build, [unit] * len(filler), length_of(cell), tokens, self.name)

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return 100 if the last word of the answer is the right number, else 0."""
        return 100.0 * (last_integer(prediction) == references[0])
