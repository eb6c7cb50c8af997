"""Chain: additions and subtractions that a model writes out line by line, each from the one before.

Our own, for models that can count. The prompt is short and the answer as long, so that a budget of
about the prompt's tokens evicts while the model writes. A line needs the result of the line before
and its step, which only the prompt has. So a line is scored by whether it takes both over: a wrong
sum costs nothing in itself, and nothing in the lines after it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from kvtool.evaluation.metrics.text import said
from kvtool.evaluation.samples.fit import Rng
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import Cell, Drawn
from kvtool.evaluation.tasks.task import Lengths, Samples

if TYPE_CHECKING:
    from kvtool.documents.settings import Protocol

_LARGEST = 99
_SPARE = 1.5  # of the shortest answer's tokens: a model may write more words
_MARKUP = re.compile(r"\\(?:boxed|[()\[\]])?|[*_`${}]")
_SIGNS = {"plus": "+", "minus": "-", "\u2212": "-", "\u2013": "-"}
_NUMBERED = re.compile(r"\W*(?:step +)?(\d{1,4}) ?[.:)]")
_SUM = re.compile(r"(?<!\d)(-?\d+) *([+-]) *(\d+)[ )]*(?:=|is|equals|gives|makes) *(?=(-?\d+))")


class Chain(Drawn):
    """Add and subtract step by step; the score is the share of steps that the answer follows.

    Attributes:
        depths: steps of the chain.
    """

    depths: Lengths = (14,)
    samples: Samples = 50

    metric: ClassVar[str] = "steps"
    reasons: ClassVar[bool] = True
    best: ClassVar[float | None] = 1.0

    def knows_query(self, protocol: Protocol) -> bool:
        """Return True: there is no context apart from the question."""
        return True

    def draw_one(self, rng: Rng, name: str, cell: Cell, tokens: TokenCounter) -> Sample:
        """Draw the steps; numbers stay from 0 to 99."""
        start = value = int(rng.integers(20, 61))
        asked, sums, answer = "", list[str](), ""
        for step in range(1, int(cell["depth"]) + 1):
            number, sign = int(rng.integers(2, 10)), int(rng.choice([-1, 1]))
            if not 0 <= value + sign * number <= _LARGEST:
                sign = -sign
            before, value = value, value + sign * number
            asked += f"{step}. {'add' if sign > 0 else 'subtract'} {number}\n"
            sums.append(f"{before} {'+' if sign > 0 else '-'} {number} = {value}")
            answer += f"{step}. {sums[-1]}\n"
        question = (
            f"Start with {start} and do these steps one after another:\n"
            f"{asked}Write each step on a line of its own as a sum."
        )
        new_tokens = round(_SPARE * tokens.count(answer))
        return Sample(name, "", (Turn(question, tuple(sums), new_tokens, "1."),), cell)

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return the share of steps whose line takes over the result before it and the step."""
        return sum(_follows(prediction, references)[0]) / len(references)

    def score(self, record: Json) -> dict[str, float]:
        """Return `steps`, and `em`: whether the last step has the right result."""
        (turn,) = record["turns"]
        right = _follows(turn["prediction"], turn["references"])[1]
        return {**super().score(record), "em": float(right)}


def _follows(prediction: str, references: Sequence[str]) -> tuple[list[bool], bool]:
    """Return for each step whether its first line follows, and whether the last result is right."""
    text = _MARKUP.sub("", said(prediction)).lower()
    for word, sign in _SIGNS.items():
        text = text.replace(word, sign)
    follows, last = [False] * len(references), None
    wanted = [reference.split() for reference in references]
    before, step, seen = wanted[0][0], 0, set[int]()
    for line in text.splitlines():
        numbered = _NUMBERED.match(line)
        for first, sign, number, result in _SUM.findall(line):
            step, numbered = int(numbered[1]) if numbered else step + 1, None
            if 0 < step <= len(wanted) and step not in seen:
                seen.add(step)
                follows[step - 1] = [first, sign, number] == [before, *wanted[step - 1][1:3]]
                last = result if step == len(wanted) else last
            before = result
    return follows, last == wanted[-1][-1]
