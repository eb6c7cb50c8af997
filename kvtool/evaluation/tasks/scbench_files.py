"""SCBench's tasks about books, papers, code and examples, whose rows are read.

Li et al., 2024, https://arxiv.org/abs/2412.10319; https://github.com/microsoft/MInference, folder
scbench. A row has `context` and `multi_turns`, a list of `input`, `answer` and, as the task needs
them, `options` or `task`. Answer lengths and scores are the benchmark's, the wording around the
data is our own in its shape. The tasks of two kinds score the mean of both kinds.

Differences: in `choice_eng` a later turn sees the right option with its letter, not its text alone.
`many_shot` wants the whole answer; the published script takes an answer letter by letter, so that
any of them counts. `repoqa` is scored as `repeats_function` says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvtool.errors import KvtoolError
from kvtool.evaluation.metrics.code import list_options, names_option, repeats_function
from kvtool.evaluation.metrics.maths import first_digits
from kvtool.evaluation.metrics.text import character_f1, rouge
from kvtool.evaluation.samples.data import Data
from kvtool.evaluation.samples.questions import option_answer, require, split_option, texts_of
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import Read
from kvtool.evaluation.tasks.scbench import SharedContext

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
