"""Needle in a haystack: one fact at a given depth of a text of a given length.

Kamradt, 2023, https://github.com/gkamradt/LLMTest_NeedleInAHaystack, whose answers a large model
judges. Here the needle is a random number, of seven digits as in RULER, so that no model knows it
and reading it off is enough. Or it is the city that a person lives in, which is one word. The
needle is between sentences, at the first gap with at least `depth` percent of the haystack's tokens
before it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BeforeValidator, Field, PositiveInt

from kvtool.errors import UsageError, quote
from kvtool.evaluation.metrics.text import contains, word_share
from kvtool.evaluation.samples import needles
from kvtool.evaluation.samples.fit import Rng
from kvtool.evaluation.samples.haystack import costs, haystack, insert, samples_version
from kvtool.evaluation.samples.sample import Json, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import Cell, Draft, Filled, length_of
from kvtool.evaluation.tasks.task import Lengths, Samples

_NEW_TOKENS = 32  # seven digits and a full stop take up to 9 tokens
_MOST_DIGITS = 15
_MOST_DEPTHS = 1001  # every tenth of a percent
_PASS_KEY_TOKENS = 128  # as in RocketKV's measurement


def _percentages(given: Any) -> list[float]:
    value = given
    try:
        if isinstance(value, str) and ("," in value or "%" in value):
            value = value.split(",")
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            count = int(value) if int(value) <= _MOST_DEPTHS else 0
            value = np.linspace(0, 100, count).round(1).tolist() if count > 1 else [50] * count
        depths = [_percentage(depth) for depth in value]
    except (TypeError, ValueError, OverflowError):
        depths = []
    if not depths or not all(0 <= depth <= 100 for depth in depths):
        raise UsageError(
            f"depths must be a number up to {_MOST_DEPTHS} or percentages from 0 to 100, "
            f"got {quote(given)}"
        )
    return list(dict.fromkeys(depths))


def _percentage(depth: Any) -> float:
    return float(depth.strip().removesuffix("%") if isinstance(depth, str) else depth)


Depths = Annotated[tuple[float, ...], BeforeValidator(_percentages)]
"""Percentages (`50%`, `0,50,100` or `[0, 50, 100]`), or how many of them from 0 to 100."""


class Hidden(Filled):
    """Find one fact in a text.

    Attributes:
        lengths: tokens of a prompt and the longest answer together.
        depths: percentages of the haystack before the needle, or how many of them.
        samples: how many of each length and depth.
        haystack: `builtin`, `noise` or a text file.
    """

    lengths: Lengths = (512, 1024, 2048)
    depths: Depths = Field(default=11, validate_default=True)
    samples: Samples = 1
    haystack: str = "builtin"

    one_answer: ClassVar[bool] = True
    metric: ClassVar[str] = "em"
    best: ClassVar[float | None] = 1.0

    @property
    def version(self) -> int:
        return samples_version(self.haystack)

    def cells(self) -> Iterator[Cell]:
        """Return every length and depth."""
        for length in self.lengths:
            for depth in self.depths:
                yield {"length": length, "depth": int(depth) if depth == int(depth) else depth}

    def draft(self, rng: Rng, cell: Cell, tokens: TokenCounter) -> Draft:
        needle, turn = self.plant(rng)
        sentences = haystack(self.haystack).draw(rng, length_of(cell))

        def build(count: int) -> tuple[str, Sequence[Turn]]:
            text = insert(sentences[:count], [needle], [float(cell["depth"])], tokens)
            return "".join(text), [turn]

        return Draft(build, costs(sentences, tokens))

    @abstractmethod
    def plant(self, rng: Rng) -> tuple[str, Turn]:
        """Draw a needle and the question about it."""

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return 1 if the fact is in the answer, whatever is around it, else 0."""
        return contains(prediction, references[0])

    def score(self, record: Json) -> dict[str, float]:
        """Return `em`, and `word_set`: whether the fact is a word of the answer by itself."""
        (turn,) = record["turns"]
        words = word_share(turn["prediction"], turn["references"][0])
        return {**super().score(record), "word_set": words}


class Needle(Hidden):
    """Find one number in a text.

    Attributes:
        digits: of the number.
    """

    digits: Annotated[PositiveInt, Field(le=_MOST_DIGITS)] = needles.DIGITS

    def plant(self, rng: Rng) -> tuple[str, Turn]:
        keys, values = needles.draw_keys(rng, 1), needles.draw_numbers(rng, 1, self.digits)
        return needles.state(keys[0], values[0]), needles.ask(keys, values, _NEW_TOKENS)


class PassKey(Needle):
    """Find a number that a sentence gives twice and calls by no name.

    The form is that of Mohtashami and Jaggi, 2023, https://arxiv.org/abs/2305.16300, the wording
    our own.
    """

    def plant(self, rng: Rng) -> tuple[str, Turn]:
        (number,) = needles.draw_numbers(rng, 1, self.digits)
        stated = f" The pass key is {number}. Remember it: {number} is the pass key."
        question = "\n Question: What is the pass key? Answer:"
        return stated, Turn(question, (number,), _PASS_KEY_TOKENS, " The pass key is")


class City(Hidden):
    """Find the city that a person lives in: one word, which small models can read off, too."""

    def plant(self, rng: Rng) -> tuple[str, Turn]:
        name, city = needles.draw_home(rng)
        return needles.state_home(name, city), needles.ask_home(name, city)
