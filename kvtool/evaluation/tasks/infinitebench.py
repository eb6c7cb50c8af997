"""INF"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvtool.evaluation.metrics.code import list_options, names_function, names_option
from kvtool.evaluation.metrics.maths import (
    first_digits,
    first_number,
    last_integer,
    leading_share,
    words_of,
)
from kvtool.evaluation.metrics.text import best, character_f1, qa_f1, rouge
from kvtool.evaluation.samples import needles
from kvtool.evaluation.samples.data import Data
from kvtool.evaluation.samples.fit import fit
from kvtool.evaluation.samples.haystack import costs, haystack, insert
from kvtool.evaluation.samples.questions import option_answer, require, split_option, texts_of
from kvtool.evaluation.samples.random_data import (
    STATISTICS,
    random_calculation,
    random_numbers,
    random_pairs,
    spread,
    units_for,
)
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import Cell, Drawn, Read, length_of

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


_CHOICE = "\n\nQuestion: {input}\n{options}\n\nThe letter of the right answer:"


@dataclass(frozen=True)
class Form:
    """How one task is put and scored.

    Attributes:
        before: the text before the context.
        question: what follows it; `{input}` and `{options}` are the row's.
        score: the score of an answer against one reference, from 0 to 1.
    """

    before: str
    question: str
    new_tokens: int
    score: Callable[[str, str], float]

    @property
    def columns(self) -> list[str]:
        """What every row must have."""
        named = [name for name in ("input", "options") if f"{{{name}}}" in self.question]
        return ["context", *named, "answer"]


def speaks(prediction: str, reference: str) -> float:
    """Return 1 if an answer contains a name as whole words, letter case aside, else 0.

    >>> speaks("It is Mrs. Smith.", "MRS SMITH"), speaks("Smithers", "SMITH")
    (1.0, 0.0)
    """
    said, name = words_of(prediction.upper()), words_of(reference.upper())
    return float(any(said[i : i + len(name)] == name for i in range(len(said))))


def _summary(prediction: str, reference: str) -> float:
    return rouge(prediction, reference, stemmer=False)["rougeLsum"] / 100


def _option(prediction: str, reference: str) -> float:
    return float(names_option(prediction, *split_option(reference)))


def _function(prediction: str, reference: str) -> float:
    return float(names_function(prediction, *split_option(reference)))


FORMS = {
    "longbook_qa_eng": Form(
        "Here is a book. A short answer is wanted to the question after it.\n\n",
        "\n\nQuestion: {input}\nAnswer:",
        40,
        qa_f1,
    ),
    "longbook_qa_chn": Form(
        "下面是一本书，书后有一个问题，请简短地回答。\n\n",
        "\n\n问题：{input}\n答案：",
        40,
        character_f1,
    ),
    "longbook_sum_eng": Form(
        "Here is a book. A summary of it is wanted.\n\n",
        "\n\nSummary of the book:",
        1200,
        _summary,
    ),
    "longbook_choice_eng": Form(
        "Here is a book. One of the four answers to the question after it is right.\n\n",
        _CHOICE,
        40,
        _option,
    ),
    "longdialogue_qa_eng": Form(
        'Here is a script in which one name was replaced by "$$MASK$$".\n\n',
        "\n\nThe name that was replaced by $$MASK$$:",
        40,
        speaks,
    ),
    "code_debug": Form(
        "Here is the code of a project. A mistake that breaks it was put into one function.\n\n",
        "\n\nIn which of these functions is the mistake?\n{options}\n\nThe letter of the function:",
        5,
        _function,
    ),
}


class BookFile(Read):
    """One question about a long text."""

    metric: ClassVar[str] = "score"

    @property
    def form(self) -> Form:
        """How this task is put and scored."""
        return FORMS[self.part]

    @property
    def extra(self) -> str | None:
        """The packages for ROUGE, where it is the score."""
        return "eval" if self.form.score is _summary else None

    def on_hub(self, data: Data) -> Data:
        """Return the split that is called as the task is."""
        return data.model_copy(update={"split": self.part}) if data.split == "test" else data

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        """Read the samples.

        Raises:
            UsageError: no data are given, or there is no such file.
            KvtoolError: data that cannot be read or lack a column; options without the answer.
        """
        rows = self.read(self.form.columns, self.part)
        for number, row in enumerate(rows.rows[: self.samples], 1):
            yield self._sample(row, number, f"{self.name}: `{rows.source}` row {number}")

    def _sample(self, row: Mapping[str, Any], number: int, where: str) -> Sample:
        form = self.form
        require(row, form.columns, where)
        references = texts_of(row["answer"])
        options = ""
        if "options" in form.columns:
            references = (option_answer(row["answer"], row["options"], where),)
            options = list_options(row["options"])
        question = form.question.format(input=row.get("input"), options=options)
        turn = Turn(question, references, form.new_tokens)
        return Sample(str(number), form.before + row["context"], (turn,))

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return the score against the nearest reference, from 0 to 100."""
        return 100 * best(self.form.score, prediction, references)
