"""Reasoning: a chain of steps that must be written out, where each needs an earlier result.

Our own. It asks what R-KV asks (https://arxiv.org/abs/2505.24133), how much of its own trace a
model still needs, without data and without a judge. Half of the variables follow the one before,
the others any earlier one, so that what was worked out long ago may be needed again. Of 64 steps
the answer is twice as long as the prompt. `kvtool.models.reference.steps_task` writes both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import AfterValidator

from kvtool.errors import UsageError
from kvtool.evaluation.samples.fit import Rng
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import Cell, Drawn
from kvtool.evaluation.tasks.task import Lengths
from kvtool.models.reference.steps_task import EXAMPLE, LONGEST, draw_trace

_SPARE = 1.25  # of the answer's tokens: a model that stumbles may still come to an end
_STATED = re.compile(r"\b([A-Z]{2}):? ([a-z]+)\b")


def _nameable(depths: tuple[int, ...]) -> tuple[int, ...]:
    """Refuse chains that there are no names for."""
    for depth in depths:
        if not 1 <= depth <= LONGEST:
            raise UsageError(f"a depth is 1 to {LONGEST} steps, got {depth}")
    return depths


class Trace(Drawn):
    """Work out the word of the last variable, step by step.

    Attributes:
        depths: steps of the chain.
        example: whether a worked example comes first, for a model that has not been trained on the
            form of the answer.
    """

    depths: Annotated[Lengths, AfterValidator(_nameable)] = (4, 8, 16, 32, 64)
    example: bool = False

    metric: ClassVar[str] = "em"
    reasons: ClassVar[bool] = True
    best: ClassVar[float | None] = 1.0

    def draw_one(self, rng: Rng, name: str, cell: Cell, tokens: TokenCounter) -> Sample:
        problem = draw_trace(rng, int(cell["depth"]))
        turn = Turn(
            problem.question,
            tuple(f"{step.name} {step.after}" for step in problem.steps),
            round(_SPARE * tokens.count(problem.answer)),
        )
        context = EXAMPLE + problem.context if self.example else problem.context
        return Sample(name, context, (turn,), cell)

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return 1 if the answer gives the last variable its word, else 0."""
        return float(_right(prediction, references)[-1])

    def score(self, record: Json) -> dict[str, float]:
        """Return `em`, and `steps`: the share of variables that the answer gives their word."""
        (turn,) = record["turns"]
        right = _right(turn["prediction"], turn["references"])
        return {**super().score(record), "steps": sum(right) / len(right)}


def _right(prediction: str, references: Sequence[str]) -> list[bool]:
    """Return, for each variable and its word, whether the answer gives that word first."""
    stated: dict[str, str] = {}
    for name, word in _STATED.findall(prediction):
        stated.setdefault(name, word)
    return [stated.get(name) == word for name, word in map(str.split, references)]
