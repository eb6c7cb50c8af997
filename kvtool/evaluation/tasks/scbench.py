"""SCBench: up to five questions about one context.

Li et al., 2024, https://arxiv.org/abs/2412.10319; https://github.com/microsoft/MInference, folder
scbench. Questions come one after the other in the same cache (`multi_turn`) or each anew from the
compressed context (`scdq`: same context, different queries).

Four tasks need no data file. Differences: samples are drawn, at any length, not read, and worded by
us. `mf` draws two-digit numbers. `vt` hides its chains in prose and words them as the bundled model
knows them. Its variable names have two letters, so they count as whole words, not anywhere in the
answer.

Tasks about books, papers, code and examples read rows. A row has `context` and `multi_turns`, a
list of `input`, `answer` and, as the task needs them, `options` or `task`. Answer lengths and
scores are the benchmark's, the wording around the data is our own in its shape. The tasks of two
kinds score the mean of both kinds. Differences: in `choice_eng` a later turn sees the right option
with its letter, not its text alone. `many_shot` wants the whole answer; the published script takes
an answer letter by letter, so that any of them counts. `repoqa` is scored as `repeats_function`
says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.metrics.code import repeats_function
from kvtool.evaluation.metrics.maths import first_digits, first_number
from kvtool.evaluation.metrics.text import character_f1, rouge_lsum, words_match_all
from kvtool.evaluation.samples.data import Data
from kvtool.evaluation.samples.fit import Rng, longest
from kvtool.evaluation.samples.haystack import costs, haystack, insert
from kvtool.evaluation.samples.questions import OPTIONS, Kind, chooses, require
from kvtool.evaluation.samples.random_data import (
    STATISTICS,
    assignments,
    random_string,
    spread,
    units_for,
)
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import (
    Asking,
    Cell,
    Draft,
    Filled,
    Read,
    length_of,
    list_draft,
    pairs_draft,
)
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
        return self.mode == "scdq"

    @property
    def after_references(self) -> bool:
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


class DrawnContext(SharedContext, Filled):
    """A task whose contexts are drawn to a length.

    Attributes:
        lengths: tokens of the longest prompt with its answer, all turns included.
        samples: contexts of each length.
    """

    samples: Samples = 10

    metric: ClassVar[str] = "accuracy"

    def draw_one(self, rng: Rng, name: str, cell: Cell, tokens: TokenCounter) -> Sample:
        """Draw a sample and fill it to its length.

        Raises:
            UsageError: the questions alone do not fit in.
        """
        length, draft = length_of(cell), self.draft(rng, cell, tokens)
        build = partial(draft.sample, name, cell)

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

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return 100 if the answer contains the right one, else 0."""
        return 100.0 * (references[0] in prediction)


class KeyValue(DrawnContext):
    """`kv`: the values of some keys of a JSON object of random UUIDs."""

    def draft(self, rng: Rng, cell: Cell, tokens: TokenCounter) -> Draft:
        return pairs_draft(rng, self.turns, cell, tokens, new_tokens=150)


class PrefixSuffix(DrawnContext):
    """`prefix_suffix`: of many random strings, the one that begins and ends in a given way."""

    def draft(self, rng: Rng, cell: Cell, tokens: TokenCounter) -> Draft:
        asked: dict[tuple[str, str], str] = {}
        while len(asked) < self.turns:
            text = _string(rng)
            asked[_ends(text)] = text
        fractions = rng.random(self.turns)
        unit = tokens.count(f"{text}, ")
        drawn = [_string(rng) for _ in range(units_for(length_of(cell), unit))]
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


class Variables(DrawnContext):
    """`vt`: values that pass from variable to variable; all the holders of one value."""

    metric: ClassVar[str] = "string_match_all"

    def draft(self, rng: Rng, cell: Cell, tokens: TokenCounter) -> Draft:
        count = max(_FEWEST_CHAINS, self.turns)
        values = rng.choice(np.arange(10_000, 100_000), count, replace=False).tolist()
        chains = rng.choice(VARIABLES, (count, _HOLDERS), replace=False).tolist()
        pairs = list(zip(values, chains, strict=True))
        facts = [fact for value, names in pairs for fact in assignments(value, names)]
        depths = np.sort(rng.uniform(0, 100, (count, _HOLDERS)), axis=1).ravel().tolist()
        filler = haystack().draw(rng, length_of(cell))
        turns = [
            Turn(
                f"\n Question: Which variables have the value {value}? Answer:",
                (" ".join(names),),
                30,
                f" The variables with the value {value}:",
            )
            for value, names in pairs[: self.turns]
        ]

        def build(units: int) -> tuple[str, Sequence[Turn]]:
            return "".join(insert(filler[:units], facts, depths, tokens)), turns

        return Draft(build, costs(filler, tokens))

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        return 100.0 * round(words_match_all(prediction, references[0].split()), 2)


class MathFind(DrawnContext):
    """`mf`: the largest, smallest and median of a long list of numbers, and second places."""

    def draft(self, rng: Rng, cell: Cell, tokens: TokenCounter) -> Draft:
        kinds = rng.permutation(list(STATISTICS)).tolist()[: self.turns]
        return list_draft(rng, kinds, cell, tokens, new_tokens=5)

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        return 100.0 * (first_number(prediction) == references[0])


def _string(rng: Rng) -> str:
    return random_string(rng, 16, 24)


def _ends(text: str) -> tuple[str, str]:
    return text[:_ENDS], text[-_ENDS:]


def _in_any_case(prediction: str, reference: str) -> float:
    return float(reference.upper() in prediction.upper())


def _in(prediction: str, reference: str) -> float:
    return float(reference in prediction)


def _pass_key(prediction: str, reference: str) -> float:
    return float(first_digits(prediction) == reference)


_ASIS = "\n\n{input}"
_REPOQA = Kind(_ASIS, 1024, repeats_function)
_BEFORE = {
    "repoqa": "Here is some code. Descriptions of functions in it follow. Give back the described "
    "function word for word, in a code block that begins and ends with ```.\n\n",
    "qa_eng": "Here is a book. Short answers are wanted to the questions after it.\n\n",
    "qa_chn": "下面是一本书，书后有一些问题，请简短地回答。\n\n",
    "choice_eng": "Here is a book. One of the four answers to each question after it is right.\n\n",
}
FORMS: dict[str, dict[str, Kind]] = {
    "repoqa": {"repoqa": _REPOQA},
    "qa_eng": {"qa_eng": Kind("\n\nQuestion: {input}\nAnswer:", 40, _in_any_case)},
    "qa_chn": {"qa_chn": Kind("\n\n问题：{input}\n答案：", 40, character_f1)},
    "choice_eng": {"choice_eng": Kind(OPTIONS, 40, chooses)},
    "many_shot": {"many_shot": Kind(_ASIS, 10, _in_any_case)},
    "summary": {"summary": Kind(_ASIS, 200, rouge_lsum)},
    "summary_with_needles": {
        "summary": Kind(_ASIS, 800, rouge_lsum),
        "passkey": Kind(_ASIS, 15, _pass_key),
    },
    "repoqa_and_kv": {"repoqa": _REPOQA, "kv": Kind(_ASIS, 80, _in)},
}
"""The kinds of questions of each task; of several, a turn says in its `task` which one it is."""


class SharedContextFile(SharedContext, Read):
    """Several questions about one long text."""

    metric: ClassVar[str] = "score"

    @property
    def kinds(self) -> dict[str, Kind]:
        """The kinds of questions of this task."""
        return FORMS[self.part]

    @property
    def extra(self) -> str | None:
        """The packages for ROUGE or BLEU, where one of them is in the score."""
        scores = {kind.score for kind in self.kinds.values()}
        return "eval" if scores & {rouge_lsum, repeats_function} else None

    def on_hub(self, data: Data) -> Data:
        """Return the config of the task."""
        return data.model_copy(update={"config": data.config or f"scbench_{self.part}"})

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        columns = ["context", "multi_turns"] + ["repo"] * ("repoqa" in self.kinds)
        rows = list(self.rows(columns, f"scbench_{self.part}"))
        turns = [self._turns(row, where) for _, row, where in rows[: self.samples]]
        functions: dict[str, dict[str, None]] = {}  # that any row asks for, by repository
        for _, row, where in rows if "repoqa" in self.kinds else ():
            found = [turn.references[0] for k, turn in self._turns(row, where) if k == "repoqa"]
            functions.setdefault(row["repo"], {}).update(dict.fromkeys(found))
        for (number, row, _), asked in zip(rows, turns, strict=False):
            kinds = [kind for kind, _ in asked[: self.turns]]
            facts: Json = {"kinds": kinds}
            if "repoqa" in kinds:
                facts["functions"] = list(functions[row["repo"]])
            context = _BEFORE.get(self.part, "") + row["context"]
            put = tuple(turn for _, turn in asked[: self.turns])
            yield Sample(str(number), context, put, facts=facts)

    def _turns(self, row: Mapping[str, Any], where: str) -> list[tuple[str, Turn]]:
        """Return the kind of each question, and how it is put."""
        turns, known = [], self.kinds
        for number, asked in enumerate(row["multi_turns"], 1):
            name, place = next(iter(known)), f"{where}, turn {number},"
            if len(known) > 1:
                require(asked, ["task"], place)
                name = asked["task"].removeprefix("scbench_")
                if name not in known:
                    raise KvtoolError(f"{place} is of task `{name}`; known: {', '.join(known)}")
            turns.append((name, known[name].turn(asked, place)))
        return turns

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return the score against the nearest reference, from 0 to 100, of the first kind."""
        return self._score(next(iter(self.kinds)), prediction, references, facts)

    def _score(self, kind: str, prediction: str, references: Sequence[str], facts: Json) -> float:
        score = self.kinds[kind].score
        others = [facts["functions"]] if score is repeats_function else []
        return 100 * max(float(score(prediction, each, *others)) for each in references)

    def score(self, record: Json) -> dict[str, float]:
        """Return the mean of the kinds, and the mean over turns of each if there are several."""
        facts, by_kind = record["facts"], dict[str, list[float]]()
        for kind, turn in zip(facts["kinds"], record["turns"], strict=True):
            score = self._score(kind, turn["prediction"], turn["references"], facts)
            by_kind.setdefault(kind, []).append(score)
        parts = {kind: sum(scores) / len(scores) for kind, scores in by_kind.items()}
        return {self.metric: sum(parts.values()) / len(parts)} | (
            parts if len(self.kinds) > 1 else {}
        )
