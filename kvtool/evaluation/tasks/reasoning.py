r"""GSM8K, MATH-500 and AIME: problems that are answered at the end of a chain of thought.

Cobbe et al., 2021, https://arxiv.org/abs/2110.14168 (GSM8K); Lightman et al., 2023,
https://arxiv.org/abs/2305.20050 (the 500 problems of MATH); AIME I and II of 2024 and 2025, 30
problems each year. What fills the cache here is what the model writes, not the prompt. Rows are
read as published: GSM8K has `question` and `answer`, a solution that ends in `#### 18`; the others
`problem` (or `question`) and `answer`, MATH-500 also `level`. `metrics/maths.py` says how an answer
is found in what a model writes, and when two are equal.

The prompts are zero-shot, worded by us; the form of the answer that they ask for is the field's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.metrics.maths import (
    as_number,
    boxed_answer,
    marked_number,
    number_answer,
    plain_latex,
    same_answer,
)
from kvtool.evaluation.metrics.text import OPEN
from kvtool.evaluation.samples.fit import generator
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import Read
from kvtool.evaluation.tasks.task import Samples, Tokens
from kvtool.models.chat import make_frame

if TYPE_CHECKING:
    from kvtool.documents.settings import Protocol
    from kvtool.evaluation.bench.bench import Bench

_QUESTION = ("problem", "question", "Problem", "Question")
_ANSWER = ("answer", "Answer")
_WORDINGS = {
    "boxed": "\n\nReason step by step. Put the final answer into \\boxed{}.",
    "hashes": "\n\nReason step by step. End with a line of `#### ` and the answer, a number alone.",
}
_TEMPERATURE = 0.6  # of several answers, as reasoning models are mostly measured
_TEMPLATE_TOKENS = 256  # left free for a chat template
_LARGEST_OF_AIME = 999


def read_solution(answer: str) -> str:
    """Return the number in which a solution of GSM8K ends.

    Raises:
        ValueError: there is none.
    """
    found = marked_number(answer)
    found = as_number(plain_latex(answer)) if found is None else found
    if found is None:
        raise ValueError("has no `#### NUMBER`")
    return str(found)


def read_integer(answer: str) -> str:
    """Return an answer of AIME, a whole number from 0 to 999.

    Raises:
        ValueError: it is another.
    """
    found = as_number(plain_latex(answer))
    if found is None or found.denominator != 1 or not 0 <= found <= _LARGEST_OF_AIME:
        raise ValueError(f"is no whole number from 0 to {_LARGEST_OF_AIME}: `{answer}`")
    return str(found)


@dataclass(frozen=True)
class Form:
    """How one benchmark is put and read.

    Attributes:
        wording: of the instruction that follows the problem, unless the task sets another.
        new_tokens: of the longest answer, unless the task sets it.
        reference: the right answer of a row; a ValueError says what the column is not.
        find: the answer in what a model writes, None if there is none.
    """

    wording: str
    new_tokens: int
    reference: Callable[[str], str]
    find: Callable[[str], Any]


FORMS = {
    "gsm8k": Form("hashes", 4096, read_solution, number_answer),
    "math500": Form("boxed", 16_384, str.strip, boxed_answer),
    "aime24": Form("boxed", 32_768, read_integer, boxed_answer),
    "aime25": Form("boxed", 32_768, read_integer, boxed_answer),
}


class Reasoning(Read):
    """Solve problems; the score is pass@1, the share of right answers.

    Of several answers to a problem the mean counts, and the standard error is one over problems, so
    that answers to the same problem do not pass for independent ones.

    Attributes:
        questions: how many problems, from the first; all by default.
        samples: answers to each problem. One is greedy, several are drawn.
        temperature: of the answers; by default that of the run, and 0.6 where several are drawn.
        max_new_tokens: of an answer; by default 4096 (GSM8K), 16384 (MATH-500) or 32768 (AIME), and
            no more than the model was trained for. That of the run overrides it.
        thinking: whether the model thinks before it answers, for chat templates that know
            `enable_thinking`; None leaves it to them.
        wording: how the form of the answer is asked for: `boxed`, which Qwen's models know, or
            `hashes` (`#### 18`), the default of GSM8K.
    """

    questions: Samples | None = None
    samples: Samples = 1
    temperature: float | None = Field(default=None, ge=0, le=100)
    max_new_tokens: Tokens | None = None
    thinking: bool | None = None
    wording: Literal["boxed", "hashes"] | None = None

    metric: ClassVar[str] = "pass@1"
    reasons: ClassVar[bool] = True

    @model_validator(mode="after")
    def _different_answers(self) -> Reasoning:
        if self.samples > 1 and self.temperature == 0:
            raise UsageError(
                f"{self.samples} samples at temperature 0 are all the same",
                hint="a temperature above 0, or samples: 1",
            )
        return self

    @property
    def form(self) -> Form:
        """How this benchmark is put and read."""
        return FORMS[self.name]

    @property
    def enable_thinking(self) -> bool | None:
        return self.thinking

    def knows_query(self, protocol: Protocol) -> bool:
        """Return True: there is no context apart from the question."""
        return True

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        table = self.read([], self.name)
        asked, wanted = table.first_of(_QUESTION), table.first_of(_ANSWER)
        for number, row in enumerate(table.rows[: self.questions], 1):
            where = f"{self.name}: `{table.source}` row {number}"
            for column in (asked, wanted):
                if not isinstance(row[column], (str, int, float)) or not str(row[column]).strip():
                    raise KvtoolError(f"{where}: `{column}` holds no text")
            try:
                reference = self.form.reference(str(row[wanted]))
            except ValueError as error:
                raise KvtoolError(f"{where}: `{wanted}` {error}") from None
            text = str(row[asked]).strip() + _WORDINGS[self.wording or self.form.wording]
            turn = Turn(text, (reference,), self._new_tokens(text, tokens))
            level = row.get("level")
            cell = {"level": level} if isinstance(level, (int, str)) else {}
            yield Sample(str(number), "", (turn,), cell, facts={"samples": self.samples})

    def _new_tokens(self, prompt: str, tokens: TokenCounter) -> int:
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if tokens.limit is None:
            return self.form.new_tokens
        left = tokens.limit - tokens.count(prompt) - _TEMPLATE_TOKENS
        return max(1, min(self.form.new_tokens, left))

    @property
    def asks_once(self) -> bool:
        return type(self).run is Reasoning.run and self.samples == 1 and not self.temperature

    def run(self, bench: Bench, sample: Sample) -> Json:
        """Answer a problem as often as asked, each time from the prompt on."""
        from kvtool.evaluation.bench.ask import ask

        frame = make_frame(
            bench.tokenizer, bench.protocol.template, self.chat, thinking=self.thinking
        )
        temperature, turns = self.temperature, []
        if temperature is None:
            several = _TEMPERATURE if self.samples > 1 else 0.0
            temperature = bench.protocol.temperature or several
        for index in range(self.samples):
            rng = generator(bench.protocol.seed, self.name, sample.id, index)
            seed = int(rng.integers(2**62))
            (turn,) = ask(bench, sample, self, temperature=temperature, seed=seed)
            if frame.thinks:  # the tag is in the prompt
                turn["prediction"] = OPEN + turn["prediction"]
            turns.append(turn)
        return {"turns": turns, "facts": sample.facts}

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return 100 if the final answer is the right one, else 0."""
        found = self._find(prediction)
        return 100.0 * (found is not None and same_answer(str(found), references[0]))

    def _find(self, prediction: str) -> Any:
        boxed = boxed_answer(prediction) if self.wording == "boxed" else None
        return self.form.find(prediction) if boxed is None else boxed

    def score(self, record: Json) -> dict[str, float]:
        """Return `pass@1`, and `answered`: how many of the answers came to an end with one."""
        found = [self._find(turn["prediction"]) for turn in record["turns"]]
        ended = 100 * sum(answer is not None for answer in found) / len(found)
        return {**super().score(record), "answered": ended}
