"""NoLiMa: a needle that shares no word with the question, so that it must be understood.

Modarressi et al., 2025, https://arxiv.org/abs/2502.05167; https://github.com/adobe-research/NoLiMa
(needle sets and books are for research only, and not shipped). `needle_set.json` is read as
published: a list of needles with `id`, `needle` (a sentence with `{CHAR}` and `{1}`, ..),
`questions` by kind (`onehop`, `twohop`), `tests` with `input_args` (and `gold_answers`, where no
character is drawn), `character_set`, and `task_template` and `system_prompt` where it has them.

Answers are right if they contain the character, in the same letter case. Needles are between
sentences, and a length is that of the whole prompt with its answer; there it is one of the book
alone. A system prompt is put at the beginning of the user's message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from kvtool.errors import KvtoolError
from kvtool.evaluation.metrics.text import said
from kvtool.evaluation.samples.fit import fit, generator
from kvtool.evaluation.samples.haystack import costs, haystack, insert, samples_version
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import ShortAnswer
from kvtool.evaluation.tasks.niah import Depths
from kvtool.evaluation.tasks.task import Lengths

_COLUMNS = ("id", "needle", "questions", "tests")
_NEW_TOKENS = 192
_FIELD = re.compile(r"\{(\d+)\}")
_CHARACTER = "{CHAR}"
_TEMPLATE = (
    "Here is a part of a book. A question about it follows.\n\n{haystack}\n\nAnswer the question "
    "from what the text says, or from what strictly follows from it.\n\nQuestion: {question}\n\n"
    "Answer with the name alone."
)


@dataclass(frozen=True)
class HiddenFact:
    """A needle and a question about it.

    Attributes:
        name: identifies it.
        characters: one of them takes the needle's `{CHAR}` and is the answer; empty: `answers`.
        template: the prompt, with `{haystack}` and `{question}`.
    """

    name: str
    needle: str
    question: str
    characters: tuple[str, ...]
    answers: tuple[str, ...]
    template: str


class NoLiMa(ShortAnswer):
    """Say which character a sentence is about that is described in other words.

    Attributes:
        samples: how many pairs of needle and question, from the first; all by default.
        lengths: tokens of a prompt and the longest answer together.
        depths: percentages of the haystack before the needle, or how many of them.
        haystack: the text of a book (`haystack/rand_shuffle/rand_book_1.txt`), `builtin`, `noise`.
    """

    lengths: Lengths = (1024,)
    depths: Depths = Field(default=5, validate_default=True)
    haystack: str = "builtin"

    metric: ClassVar[str] = "accuracy"
    file: ClassVar[str] = "needlesets/needle_set.json of NoLiMa"

    @property
    def version(self) -> int:
        return samples_version(self.haystack)

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        """Hide every needle at every length and depth."""
        rows = self.rows(_COLUMNS, "needle_set")
        tests = [test for _, row, where in rows for test in read_tests(row, where)]
        for length in self.lengths:
            for depth in self.depths:
                for test in tests[: self.samples]:
                    yield self._hide(test, length, depth, tokens)

    def _hide(self, test: HiddenFact, length: int, depth: float, tokens: TokenCounter) -> Sample:
        name = f"length={length}/depth={depth:g}/{test.name}"
        rng = generator(self.seed, self.name, length, depth, test.name)
        needle, answers = test.needle, test.answers
        if test.characters:
            answers = (test.characters[int(rng.integers(len(test.characters)))],)
            needle = needle.replace(_CHARACTER, answers[0])
        before, _, after = test.template.partition("{haystack}")
        turn = Turn(after.replace("{question}", test.question), answers, _NEW_TOKENS)
        sentences = haystack(self.haystack).draw(rng, length)
        cell = {"length": length, "depth": int(depth) if depth == int(depth) else depth}

        def build(count: int) -> Sample:
            text = insert(sentences[:count], [f" {needle}"], [depth], tokens)
            return Sample(name, before + "".join(text).strip(), (turn,), cell)

        return fit(build, costs(sentences, tokens), length, tokens, self.name)

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return 100 if the answer contains one of the right answers, else 0."""
        return 100.0 * any(reference in said(prediction) for reference in references)


def read_tests(row: Mapping[str, Any], where: str) -> list[HiddenFact]:
    """Read the tests of one needle: each of its questions about each of its inputs.

    Raises:
        KvtoolError: it lacks something, or has a form that is not read here.
    """
    if row.get("distractors"):
        raise KvtoolError(f"{where} has `distractors`, which are not read; use needle_set.json")
    template = row.get("task_template") or _TEMPLATE
    template = f"{row['system_prompt']}\n\n{template}" if row.get("system_prompt") else template
    before, found, after = template.partition("{haystack}")
    if not found or "{question}" in before or "{question}" not in after:
        raise KvtoolError(f"{where}: `task_template` must have {{haystack}}, and then {{question}}")
    tests = []
    for kind, question in row["questions"].items():
        for name, test in row["tests"].items():
            if question is None or test is None:  # in rows of the hub, what other rows have
                continue
            tests.append(_test(row, f"{row['id']}_{name}_{kind}", question, test, template, where))
    return tests


def _test(
    row: Mapping[str, Any], name: str, question: str, test: Any, template: str, where: str
) -> HiddenFact:
    try:
        inputs = [str(each) for each in test["input_args"]]
        needle, asked = (
            _FIELD.sub(lambda found: inputs[int(found[1]) - 1], text)
            for text in (row["needle"], question)
        )
    except (KeyError, TypeError, IndexError):
        raise KvtoolError(
            f"{where}: `tests` need `input_args`, one for each number in braces of the needle and "
            "the question"
        ) from None
    characters = tuple(row.get("character_set") or ()) if _CHARACTER in needle else ()
    answers = test.get("gold_answers") or ()
    answers = (answers,) if isinstance(answers, str) else tuple(answers)
    if not characters and not answers:
        raise KvtoolError(f"{where} has neither `character_set` nor `gold_answers`")
    return HiddenFact(name, needle, asked, characters, answers, template)
