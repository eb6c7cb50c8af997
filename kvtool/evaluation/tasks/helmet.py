"""HELMET's recall tasks: a value in a large JSON object, and three of RULER's needle tasks.

Yen et al., 2024, https://arxiv.org/abs/2410.02694, https://github.com/princeton-nlp/HELMET. Rows
are those of its files: `data/json_kv/test_k1800_dep6.jsonl` has `context`, `question` (a key),
`answer` and `demos` (pairs of key and value), `data/ruler/niah_multikey_2/validation_131072.jsonl`
and its like have `context`, `query`, `type_needle_v` and `answer` (or `outputs`). Answers are as
long as there and scored by substrings; the wording around the data is our own in its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, ClassVar

from pydantic import Field

from kvtool.errors import KvtoolError
from kvtool.evaluation.metrics.text import said, string_match_all
from kvtool.evaluation.samples.questions import texts_of
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import ShortAnswer

_PAIR = "Key: {}\nCorresponding value:"
_HIDDEN = "{several} special magic {kind} {are} hidden in the text below. A question follows.\n\n"


@dataclass(frozen=True)
class Form:
    """How one task is put.

    Attributes:
        file: where HELMET has its rows.
        several: whether a key has several values.
    """

    file: str
    new_tokens: int
    several: bool = False


FORMS = {
    "json_kv": Form("json_kv/test_k1800_dep6.jsonl", 100),
    "ruler_niah_mk_2": Form("ruler/niah_multikey_2/validation_131072.jsonl", 50),
    "ruler_niah_mk_3": Form("ruler/niah_multikey_3/validation_131072.jsonl", 100),
    "ruler_niah_mv": Form("ruler/niah_multivalue/validation_131072.jsonl", 50, several=True),
}


class Helmet(ShortAnswer):
    """Find one value, or all values of a key.

    Attributes:
        shots: examples of a key and its value before the question of `json_kv`.
    """

    shots: Annotated[int, Field(ge=0, le=100)] = 2

    metric: ClassVar[str] = "string_match_all"

    @property
    def form(self) -> Form:
        """How this task is put."""
        return FORMS[self.part]

    @property
    def missing(self) -> str | None:
        """Which file is needed; HELMET's are packed in an archive, which no hub client reads."""
        return None if self.data else f"data: a file of HELMET, such as data/{self.form.file}"

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        pairs = self.part == "json_kv"
        columns = ["context", "question"] if pairs else ["context", "query", "type_needle_v"]
        for number, row, where in islice(self.rows(columns, self.part), self.samples):
            answers = row.get("answer", row.get("outputs"))
            references = tuple(text for text in texts_of(answers or []) if text)
            if not references:
                raise KvtoolError(f"{where} lacks an `answer` (or `outputs`)")
            before, question, cue = self._pair(row, where) if pairs else self._needle(row)
            turn = Turn(question, references, self.form.new_tokens, cue)
            yield Sample(str(number), before + str(row["context"]), (turn,))

    def _pair(self, row: Mapping[str, Any], where: str) -> tuple[str, str, str]:
        demos = row.get("demos") or []
        if len(demos) < self.shots or not all(
            isinstance(each, (list, tuple)) and len(each) == 2 for each in demos[: self.shots]
        ):
            raise KvtoolError(
                f"{where} lacks {self.shots} pairs of key and value in `demos`",
                hint="shots: 0 asks without examples",
            )
        examples = "".join(f"{_PAIR.format(key)} {value}\n\n" for key, value in demos[: self.shots])
        question, cue = _PAIR.format(row["question"]).rsplit("\n", 1)
        asked = "\n\nWhat is the value of a key in the JSON object above?\n\n"
        return "", asked + examples + question, f"\n{cue}"

    def _needle(self, row: Mapping[str, Any]) -> tuple[str, str, str]:
        kind, key = row["type_needle_v"], row["query"]
        several, are, all_ = ("Some", "are", " all") if self.form.several else ("A", "is", "")
        question = f"\n\nWhat {are}{all_} the special magic {kind} for {key} in the text?"
        cue = f"\nThe special magic {kind} for {key} in the text {are}"
        return _HIDDEN.format(several=several, kind=kind, are=are), question, cue

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return the percentage of right values that the answer contains, letter case aside."""
        return 100 * string_match_all(said(prediction), references)
