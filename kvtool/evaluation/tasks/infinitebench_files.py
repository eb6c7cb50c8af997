"""InfiniteBench's tasks about books, plays and code, whose rows are read.

Zhang et al., 2024, https://arxiv.org/abs/2402.13718; https://github.com/OpenBMB/InfiniteBench. A
row has `context` and `answer`, and `input` or `options` where the task needs them. Answer lengths
and scores are the benchmark's, the wording of the prompts is our own in their shape. Too long a
context is cut in the middle, as there, when it meets a model.

Differences: a name of several words in a play (`MRS SMITH`) can be found; the benchmark looks for
it among single words. In `code_debug` the letter may be alone, see `names_function`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvtool.evaluation.metrics.code import list_options, names_function, names_option
from kvtool.evaluation.metrics.maths import words_of
from kvtool.evaluation.metrics.text import best, character_f1, qa_f1, rouge
from kvtool.evaluation.samples.data import Data
from kvtool.evaluation.samples.questions import option_answer, require, split_option, texts_of
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import Read

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
