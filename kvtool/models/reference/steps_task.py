"""Problems that are solved step by step: a step needs a word that an earlier one has worked out.

Every word has a word after it. A variable gets the word after that of an earlier variable, and the
answer writes all of it out, variable by variable:

     Words: lamp: harbor harbor: falcon falcon: lamp.
     List: BA: falcon BE: BA BI: BE.
     Question: What is the value for BI? Answer: BE: BA falcon: lamp BE lamp BI: BE lamp: harbor
     BI harbor.

A step is the variable, the one it follows, that one's word, the word after it, and what is stated
at last: the variable and its word. The answer is three times as long as its part of the list.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from kvtool.errors import KvtoolError
from kvtool.models.reference.vocabulary import NOUNS, VARIABLES

GIVEN = 3
"""Variables whose words the list gives."""

LONGEST = len(VARIABLES) - GIVEN
"""Steps that there are names for."""

_PREVIOUS = 0.5
_STEP = 8  # tokens: two in the list, six in the answer


@dataclass(frozen=True)
class Step:
    """A variable, the earlier one that it follows, and the words of both."""

    name: str
    source: str
    before: str
    after: str

    def text(self) -> str:
        """Write the step out."""
        return f" {self.name}: {self.source} {self.before}: {self.after} {self.name} {self.after}"


@dataclass(frozen=True)
class Trace:
    """A problem and its solution.

    Attributes:
        following: the word after each word, a permutation.
        given: the first variables and their words.
        steps: the other variables, in order.
    """

    following: dict[str, str]
    given: dict[str, str]
    steps: tuple[Step, ...]

    @property
    def context(self) -> str:
        """The words and the list of variables."""
        pairs = "".join(f" {word}: {after}" for word, after in self.following.items())
        listed = [*self.given.items(), *((step.name, step.source) for step in self.steps)]
        return f" Words:{pairs}.\n List:" + "".join(f" {a}: {b}" for a, b in listed) + "."

    @property
    def question(self) -> str:
        """The question for the last variable, up to where the answer begins."""
        return f"\n Question: What is the value for {self.steps[-1].name}? Answer:"

    @property
    def answer(self) -> str:
        """All steps, and a full stop."""
        return "".join(step.text() for step in self.steps) + "."

    @property
    def solved(self) -> str:
        """Context, question and answer."""
        return self.context + self.question + self.answer


def draw_trace(rng: np.random.Generator, depth: int, words: int = 12) -> Trace:
    """Draw a problem of `depth` steps.

    Half of the variables follow the one before, the others any earlier one: what a step has worked
    out may be needed at once, long after, or never. Variables are named in alphabetical order.

    Args:
        depth: 1 to `LONGEST`.
        words: how many there are in a circle of random order.
    """
    first = int(rng.integers(0, LONGEST - depth + 1))
    names = VARIABLES[first : first + GIVEN + depth]
    circle = rng.choice(NOUNS, words, replace=False).tolist()
    pairs = list(itertools.pairwise([*circle, circle[0]]))
    following = dict(pairs[index] for index in rng.permutation(words))
    held = {name: circle[rng.integers(words)] for name in names[:GIVEN]}
    given = dict(held)
    steps = []
    for index in range(GIVEN, len(names)):
        previous = rng.random() < _PREVIOUS
        source = names[index - 1 if previous else rng.integers(index)]
        held[names[index]] = following[held[source]]
        steps.append(Step(names[index], source, held[source], held[names[index]]))
    return Trace(following, given, tuple(steps))


EXAMPLE = (
    Trace(
        {"acorn": "almond", "almond": "acorn"},
        {"ZE": "acorn"},
        (Step("ZI", "ZE", "acorn", "almond"), Step("ZO", "ZI", "almond", "acorn")),
    ).solved
    + "\n"
)
"""A solved problem, for models that have seen none."""


def longest_within(tokens: int, words: int = 12) -> int:
    """Return the most steps whose problem and answer together have at most `tokens` tokens."""
    room = tokens - 21 - 2 * (words + GIVEN)
    if room < _STEP:
        needed = tokens - room + _STEP
        raise KvtoolError(f"tokens {tokens} is too few for steps, which need {needed}")
    return min(LONGEST, room // _STEP)
