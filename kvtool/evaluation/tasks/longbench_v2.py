"""LongBench v2: questions with four choices on texts of 8,000 to 2 million words.

Bai et al., 2024, https://arxiv.org/abs/2412.15204, https://github.com/THUDM/LongBench. A row of
`data.json` (or of the dataset on the hub) has `context`, `question`, `choice_A` to `choice_D`,
`answer` (a letter), `difficulty` (easy, hard) and `length` (short, medium, long). The length of an
answer, the way a choice is read from it, and truncation in the middle are the benchmark's. The
wording is our own in its shape, unless its `prompts/0shot.txt` is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import ClassVar

from kvtool.documents.files import digest, expand
from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.metrics.code import LETTERS, stated_letter
from kvtool.evaluation.metrics.text import said
from kvtool.evaluation.samples.data_files import Row, load_text, read_by
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import ShortAnswer
from kvtool.evaluation.tasks.task import Place

_CHOICES = tuple(f"choice_{letter}" for letter in LETTERS)
_COLUMNS = ("context", "question", *_CHOICES, "answer", "difficulty", "length")
_NEW_TOKENS = 128
_FIELD = re.compile(r"\$(DOC|Q|C_[A-D])\$")
_TEMPLATE = """A long text, and a question about it with four choices.

<text>
$DOC$
</text>

Question: $Q$
Choices:
(A) $C_A$
(B) $C_B$
(C) $C_C$
(D) $C_D$

One choice is right. Answer with one sentence, its letter in brackets, and nothing else:
"The correct answer is (letter)"."""


class LongBenchV2(ShortAnswer):
    """Choose one of four answers.

    Attributes:
        prompts: LongBench v2's `0shot.txt`, or another text with `$DOC$`, `$Q$` and `$C_A$` to
            `$C_D$` in it.
    """

    prompts: str | None = None

    metric: ClassVar[str] = "accuracy"

    @property
    def protocol(self) -> str:
        """Whose wording the prompts have."""
        return "kvtool-wording" if self.prompts is None else "user-prompts"

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        """Read the samples.

        Raises:
            UsageError: no data, or a prompt that lacks a field.
            KvtoolError: data that lack a column, or have no such choice.
        """
        (before, after), facts = self._template()
        filled = {"Q": "question", **{f"C_{letter}": f"choice_{letter}" for letter in LETTERS}}
        for number, row, where in islice(self.rows(_COLUMNS, "data", _COLUMNS), self.samples):
            answer = row["answer"].strip()
            if answer not in tuple(LETTERS):
                raise KvtoolError(f"{where}: `answer` must be A, B, C or D, got `{answer}`")

            def fill(found: re.Match[str], row: Row = row) -> str:
                return row[filled[found[1]]].strip()

            yield Sample(
                str(number),
                before + row["context"].strip(),
                (Turn(_FIELD.sub(fill, after), (answer,), _NEW_TOKENS),),
                {"difficulty": row["difficulty"], "length_bucket": row["length"]},
                dict(facts),
            )

    def _template(self) -> tuple[tuple[str, str], Json]:
        """Return the texts before and after the context, and the facts of all samples."""
        text, facts = _TEMPLATE, {"protocol": self.protocol}
        if self.prompts is not None:
            file = expand(self.prompts)
            text = read_by(load_text, file, task=f"{self.name}: prompts")
            facts["prompts"] = digest(file)
        before, _, after = text.partition("$DOC$")
        if sorted(_FIELD.findall(after)) != sorted(("Q", *(f"C_{each}" for each in LETTERS))) or (
            _FIELD.search(before)
        ):
            raise UsageError(
                f"{self.name}: `{self.prompts}` must have `$DOC$`, and then `$Q$` and `$C_A$` to "
                "`$C_D$` once each",
                hint="the text comes first, so that it can be compressed without the question",
            )
        return (before, after), facts

    def places(self, cell: Place) -> list[Place]:
        """Return difficulty and length apart, as the benchmark gives them."""
        return [{name: value} for name, value in cell.items()]

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return 100 if the answer states the right letter, else 0."""
        return 100.0 * (stated_letter(said(prediction)) == references[0])
