"""InfiniteBench: six tasks drawn at any length, and six about books, plays and code.

Zhang et al., 2024, https://arxiv.org/abs/2402.13718; https://github.com/OpenBMB/InfiniteBench.
Answer lengths and scores are the benchmark's.

Drawn tasks need no data. Differences: samples are drawn, not read, and worded by us; the two needle
tasks as the bundled reference model knows them. `math_find` and `math_calc` use numbers of at most
two digits, and no step of a calculation falls below 0, since the score reads digits without a sign.
A `math_calc` answer may take as many tokens as the right one and a few more, not always 30,000.
`code_run` takes shallower calls where a length is too short for deep ones.

The others read rows with `context` and `answer`, and `input` or `options` where the task needs
them. The wording of the prompts is our own in their shape. Too long a context is cut in the middle,
as there, when it meets a model. Differences: a name of several words in a play (`MRS SMITH`) can be
found; the benchmark looks for it among single words. In `code_debug` the letter may be alone, see
`names_function`.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from kvtool.evaluation.metrics.code import names_function
from kvtool.evaluation.metrics.maths import (
    first_digits,
    first_number,
    last_integer,
    leading_share,
    words_of,
)
from kvtool.evaluation.metrics.text import best, character_f1, qa_f1, rouge_lsum
from kvtool.evaluation.samples import needles
from kvtool.evaluation.samples.data import Data
from kvtool.evaluation.samples.fit import Rng
from kvtool.evaluation.samples.haystack import costs, haystack, insert
from kvtool.evaluation.samples.questions import OPTIONS, Kind, chooses, split_option
from kvtool.evaluation.samples.random_data import STATISTICS, random_calculation, spread, units_for
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import (
    Cell,
    Draft,
    Filled,
    Read,
    length_of,
    list_draft,
    pairs_draft,
)

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


def call_chain(rng: Rng, names: Sequence[int]) -> list[Function]:
    """Draw functions that each call the next."""
    callees = [*names[1:], None]
    return [Function(name, calls, _added(rng)) for name, calls in zip(names, callees, strict=True)]


def unrelated_functions(rng: Rng, names: Sequence[int], deepest: int) -> list[Function]:
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


def _added(rng: Rng) -> int:
    size = int(rng.integers(1, _LARGEST_ADDED + 1))
    return size if rng.random() < 0.5 else -size


_SPARE = 8  # tokens that a calculation may take beyond the right answer
_DEEPEST = 10  # functions that one call goes through
_LARGEST_ARGUMENT = 20


class HiddenNumber(Filled):
    """Find a number that is stated twice in the same few sentences, said over and over."""

    metric: ClassVar[str] = "accuracy"

    @abstractmethod
    def plant(self, rng: Rng) -> tuple[str, int]:
        """Draw the number and say how many tokens an answer may have."""

    def draft(self, rng: Rng, cell: Cell, tokens: TokenCounter) -> Draft:
        (key,), (number, new) = needles.draw_keys(rng, 1), self.plant(rng)
        turn, needle = needles.ask([key], [number], new), 2 * needles.state(key, number)
        sentences = haystack("noise").draw(rng, length_of(cell))
        depth = rng.uniform(0, 100)

        def build(count: int) -> tuple[str, Sequence[Turn]]:
            return "".join(insert(sentences[:count], [needle], [depth], tokens)), [turn]

        return Draft(build, costs(sentences, tokens))

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return 100 if the first digits are the number, else 0."""
        return 100.0 * (first_digits(prediction) == references[0])


class PassKeyRetrieval(HiddenNumber):
    """`passkey`: a number of five digits."""

    def plant(self, rng: Rng) -> tuple[str, int]:
        return "".join(map(str, rng.integers(0, 10, 5).tolist())), 6


class NumberRetrieval(HiddenNumber):
    """`number_string`: ten digits, each written twice in a row."""

    def plant(self, rng: Rng) -> tuple[str, int]:
        return "".join(2 * str(digit) for digit in rng.integers(0, 10, 5).tolist()), 12


class KeyValueRetrieval(Filled):
    """`kv_retrieval`: the value of one key of a JSON object of random UUIDs."""

    metric: ClassVar[str] = "accuracy"

    def draft(self, rng: Rng, cell: Cell, tokens: TokenCounter) -> Draft:
        return pairs_draft(rng, 1, cell, tokens, new_tokens=50)

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return 100 if the value is a word of the answer, punctuation aside, else 0."""
        return 100.0 * (references[0] in words_of(prediction))


class MathFindNumber(Filled):
    """`math_find`: the largest or smallest number of a list, the second one, or the median."""

    metric: ClassVar[str] = "accuracy"

    def draft(self, rng: Rng, cell: Cell, tokens: TokenCounter) -> Draft:
        kinds = [rng.choice(list(STATISTICS)).item()]
        return list_draft(rng, kinds, cell, tokens, new_tokens=3)

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return 100 if the first number is the right one, else 0."""
        return 100.0 * (first_number(prediction) == references[0])


class MathCalculation(Filled):
    """`math_calc`: the value after every step of a long calculation.

    The score is the fraction of values before the first wrong one.
    """

    metric: ClassVar[str] = "leading_share"

    def draft(self, rng: Rng, cell: Cell, tokens: TokenCounter) -> Draft:
        unit = tokens.count(" + 47") + tokens.count(", 52")
        steps, values = random_calculation(rng, units_for(length_of(cell), unit))

        def build(count: int) -> tuple[str, Sequence[Turn]]:
            answer = ", ".join(map(str, values[: 2 + count]))
            context = (
                " The value after every step of a calculation.\n"
                f"Calculation: 12 + 5 - 9\nValues: 12, 17, 8\n"
                f"Calculation: {' '.join(steps[: 2 + count])}"
            )
            new = min(30_000, tokens.count(f" {answer}") + _SPARE)
            return context, [Turn("\nValues:", (answer,), new)]

        return Draft(build, [unit] * (len(steps) - 2))

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return the percentage of values before the first wrong one."""
        return 100 * leading_share(prediction, re.findall("[0-9]+", references[0]))


class CodeRun(Filled):
    """`code_run`: what a function returns that calls another, and that one the next."""

    metric: ClassVar[str] = "accuracy"

    def draft(self, rng: Rng, cell: Cell, tokens: TokenCounter) -> Draft:
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

        def build(count: int) -> tuple[str, Sequence[Turn]]:
            code = "\n".join(map(str, spread(filler[:count], chain, fractions)))
            return f" Some functions in Python:\n{code}", [turn]

        return Draft(build, [unit] * len(filler))

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return 100 if the last word of the answer is the right number, else 0."""
        return 100.0 * (last_integer(prediction) == references[0])


def speaks(prediction: str, reference: str) -> float:
    """Return 1 if an answer contains a name as whole words, letter case aside, else 0.

    >>> speaks("It is Mrs. Smith.", "MRS SMITH"), speaks("Smithers", "SMITH")
    (1.0, 0.0)
    """
    said, name = words_of(prediction.upper()), words_of(reference.upper())
    return float(any(said[i : i + len(name)] == name for i in range(len(said))))


def _function(prediction: str, reference: str) -> float:
    return float(names_function(prediction, *split_option(reference)))


FORMS: dict[str, tuple[str, Kind]] = {  # the text before the context, and the question after it
    "longbook_qa_eng": (
        "Here is a book. A short answer is wanted to the question after it.\n\n",
        Kind("\n\nQuestion: {input}\nAnswer:", 40, qa_f1),
    ),
    "longbook_qa_chn": (
        "下面是一本书，书后有一个问题，请简短地回答。\n\n",
        Kind("\n\n问题：{input}\n答案：", 40, character_f1),
    ),
    "longbook_sum_eng": (
        "Here is a book. A summary of it is wanted.\n\n",
        Kind("\n\nSummary of the book:", 1200, rouge_lsum),
    ),
    "longbook_choice_eng": (
        "Here is a book. One of the four answers to the question after it is right.\n\n",
        Kind(OPTIONS, 40, chooses),
    ),
    "longdialogue_qa_eng": (
        'Here is a script in which one name was replaced by "$$MASK$$".\n\n',
        Kind("\n\nThe name that was replaced by $$MASK$$:", 40, speaks),
    ),
    "code_debug": (
        "Here is the code of a project. A mistake that breaks it was put into one function.\n\n",
        Kind(
            "\n\nIn which of these functions is the mistake?\n{options}\n\n"
            "The letter of the function:",
            5,
            _function,
        ),
    ),
}


class BookFile(Read):
    """One question about a long text."""

    metric: ClassVar[str] = "score"

    @property
    def kind(self) -> Kind:
        """How this task is put and scored."""
        return FORMS[self.part][1]

    @property
    def extra(self) -> str | None:
        """The packages for ROUGE, where it is the score."""
        return "eval" if self.kind.score is rouge_lsum else None

    def on_hub(self, data: Data) -> Data:
        """Return the split that is called as the task is."""
        return data.model_copy(update={"split": self.part}) if data.split == "test" else data

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        for number, row, where in islice(self.rows(["context"], self.part), self.samples):
            context = FORMS[self.part][0] + row["context"]
            yield Sample(str(number), context, (self.kind.turn(row, where),))

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return the score against the nearest reference, from 0 to 100."""
        return 100 * best(self.kind.score, prediction, references)
