"""SCB"""

from __future__ import annotations

import itertools
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.metrics.code import list_options, names_option, repeats_function
from kvtool.evaluation.metrics.maths import first_digits, first_number
from kvtool.evaluation.metrics.text import character_f1, rouge, words_match_all
from kvtool.evaluation.samples.data import Data
from kvtool.evaluation.samples.fit import longest
from kvtool.evaluation.samples.haystack import costs, haystack, insert
from kvtool.evaluation.samples.questions import option_answer, require, split_option, texts_of
from kvtool.evaluation.samples.random_data import (
    STATISTICS,
    random_numbers,
    random_pairs,
    random_string,
    spread,
    units_for,
)
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import Asking, Cell, Drawn, Read, length_of
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


_ASIS = "\n\n{input}"


@dataclass(frozen=True)
class Kind:
    """How one kind of question is put and scored.

    Attributes:
        question: `{input}` and `{options}` are the turn's.
        score: the score of an answer against one reference, from 0 to 1.
        packages: whether the score needs the packages of the extra `eval`.
    """

    question: str
    new_tokens: int
    score: Callable[[str, str, Json], float]
    packages: bool = False


def _summary(prediction: str, reference: str, facts: Json) -> float:
    return rouge(prediction, reference, stemmer=False)["rougeLsum"] / 100


def _function(prediction: str, reference: str, facts: Json) -> float:
    return float(repeats_function(prediction, reference, facts["functions"]))


def _in_any_case(prediction: str, reference: str, facts: Json) -> float:
    return float(reference.upper() in prediction.upper())


def _in(prediction: str, reference: str, facts: Json) -> float:
    return float(reference in prediction)


def _characters(prediction: str, reference: str, facts: Json) -> float:
    return character_f1(prediction, reference)


def _option(prediction: str, reference: str, facts: Json) -> float:
    return float(names_option(prediction, *split_option(reference)))


def _pass_key(prediction: str, reference: str, facts: Json) -> float:
    return float(first_digits(prediction) == reference)


@dataclass(frozen=True)
class Form:
    """The text before the context of a task, and its kinds of questions.

    A turn of a task with several kinds says in its `task` which one it is.
    """

    before: str
    kinds: Mapping[str, Kind]


_FIND_FUNCTION = (
    "Here is some code. Descriptions of functions in it follow. Give back the described function "
    "word for word, in a code block that begins and ends with ```.\n\n"
)
_OPTIONS = "\n\nQuestion: {input}\n{options}\n\nThe letter of the right answer:"

FORMS = {
    "repoqa": Form(_FIND_FUNCTION, {"repoqa": Kind(_ASIS, 1024, _function, packages=True)}),
    "qa_eng": Form(
        "Here is a book. Short answers are wanted to the questions after it.\n\n",
        {"qa_eng": Kind("\n\nQuestion: {input}\nAnswer:", 40, _in_any_case)},
    ),
    "qa_chn": Form(
        "下面是一本书，书后有一些问题，请简短地回答。\n\n",
        {"qa_chn": Kind("\n\n问题：{input}\n答案：", 40, _characters)},
    ),
    "choice_eng": Form(
        "Here is a book. One of the four answers to each question after it is right.\n\n",
        {"choice_eng": Kind(_OPTIONS, 40, _option)},
    ),
    "many_shot": Form("", {"many_shot": Kind(_ASIS, 10, _in_any_case)}),
    "summary": Form("", {"summary": Kind(_ASIS, 200, _summary, packages=True)}),
    "summary_with_needles": Form(
        "",
        {
            "summary": Kind(_ASIS, 800, _summary, packages=True),
            "passkey": Kind(_ASIS, 15, _pass_key),
        },
    ),
    "repoqa_and_kv": Form(
        "",
        {
            "repoqa": Kind(_ASIS, 1024, _function, packages=True),
            "kv": Kind(_ASIS, 80, _in),
        },
    ),
}


class SharedContextFile(SharedContext, Read):
    """Several questions about one long text."""

    metric: ClassVar[str] = "score"

    @property
    def form(self) -> Form:
        """How this task is put and scored."""
        return FORMS[self.part]

    @property
    def extra(self) -> str | None:
        """The packages for ROUGE or BLEU, where one of them is in the score."""
        return "eval" if any(kind.packages for kind in self.form.kinds.values()) else None

    def on_hub(self, data: Data) -> Data:
        """Return the config of the task."""
        return data.model_copy(update={"config": data.config or f"scbench_{self.part}"})

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        """Read the samples.

        Raises:
            UsageError: no data are given, or there is no such file.
            KvtoolError: data that cannot be read or lack a column; options without the answer.
        """
        columns = ["context", "multi_turns"] + ["repo"] * ("repoqa" in self.form.kinds)
        rows = self.read(columns, f"scbench_{self.part}")
        places = [f"{self.name}: `{rows.source}` row {i}" for i in range(1, len(rows.rows) + 1)]
        for row, where in zip(rows.rows, places, strict=True):
            require(row, columns, where)
        functions = self._functions(rows.rows, places) if "repoqa" in self.form.kinds else {}
        pairs = itertools.islice(zip(rows.rows, places, strict=True), self.samples)
        for number, (row, where) in enumerate(pairs, 1):
            turns, kinds = [], []
            for kind, turn in self._turns(row, where)[: self.turns]:
                turns.append(turn)
                kinds.append(kind)
            facts: Json = {"kinds": kinds}
            if "repoqa" in kinds:
                facts["functions"] = functions[row["repo"]]
            yield Sample(str(number), self.form.before + row["context"], tuple(turns), facts=facts)

    def _functions(
        self, rows: Sequence[Mapping[str, Any]], places: Sequence[str]
    ) -> dict[str, list[str]]:
        """Return, for every repository, the functions that any row asks for."""
        found: dict[str, dict[str, None]] = {}
        for row, where in zip(rows, places, strict=True):
            of_repository = found.setdefault(row["repo"], {})
            for kind, turn in self._turns(row, where):
                if kind == "repoqa":
                    of_repository[turn.references[0]] = None
        return {repository: list(functions) for repository, functions in found.items()}

    def _turns(self, row: Mapping[str, Any], where: str) -> list[tuple[str, Turn]]:
        return [
            self._turn(asked, f"{where}, turn {number},")
            for number, asked in enumerate(row["multi_turns"], 1)
        ]

    def _turn(self, asked: Mapping[str, Any], where: str) -> tuple[str, Turn]:
        """Return the kind of a question and how it is put."""
        kinds = self.form.kinds
        require(asked, ["input", "answer"] + ["task"] * (len(kinds) > 1), where)
        name = next(iter(kinds))
        if len(kinds) > 1:
            name = asked["task"].removeprefix("scbench_")
            if name not in kinds:
                raise KvtoolError(f"{where} is of task `{name}`; known: {', '.join(kinds)}")
        kind, references, options = kinds[name], texts_of(asked["answer"]), ""
        if "{options}" in kind.question:
            require(asked, ["options"], where)
            references = (option_answer(asked["answer"], asked["options"], where),)
            options = list_options(asked["options"])
        question = kind.question.format(input=asked["input"], options=options)
        return name, Turn(question, references, kind.new_tokens)

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return the score against the nearest reference, from 0 to 100, of the first kind."""
        return self._score(next(iter(self.form.kinds)), prediction, references, facts)

    def _score(self, kind: str, prediction: str, references: Sequence[str], facts: Json) -> float:
        score = self.form.kinds[kind].score
        return 100 * max(score(prediction, reference, facts) for reference in references)

    def score(self, record: Json) -> dict[str, float]:
        """Return the mean of the kinds, and the mean over turns of each if there are several."""
        facts, by_kind = record["facts"], dict[str, list[float]]()
        for kind, turn in zip(facts["kinds"], record["turns"], strict=True):
            score = self._score(kind, turn["prediction"], turn["references"], facts)
            by_kind.setdefault(kind, []).append(score)
        parts = {kind: sum(scores) / len(scores) for kind, scores in by_kind.items()}
        return {self.metric: sum(parts.values()) / len(parts)} | (
            parts if len(self.form.kinds) > 1 else {}
        )
