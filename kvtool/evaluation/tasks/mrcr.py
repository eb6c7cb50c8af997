"""MRCR: say again the second of several poems about one thing, written in a long conversation.

OpenAI, 2025, https://huggingface.co/datasets/openai/mrcr, after Vodrahalli et al., 2024,
https://arxiv.org/abs/2409.12640. A row has `prompt`, the JSON text of a list of messages (`role`,
`content`), the last one the question; `answer`; `random_string_to_prepend`, with which an answer
has to begin; `n_needles`. Messages become turns of the chat template; without one, they are marked
`User:` and `Assistant:`. Rows that are longer than what the model was trained for are left out, as
there; the length is counted by the model's own tokenizer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any, ClassVar, Literal

from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.bench.prompts import SPOKEN, transcript
from kvtool.evaluation.metrics.text import recited, said
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import ShortAnswer
from kvtool.evaluation.tasks.task import Tokens

_COLUMNS = ("prompt", "answer", "random_string_to_prepend", "n_needles")
_NEW_TOKENS = 2048
_SHORTEST_BIN = 4096  # tokens; each further bin is twice as long
_CHARACTERS = 16  # more than a token has in the mean: longer texts need not be counted


class Mrcr(ShortAnswer):
    """Recite one of several texts of the same kind from a conversation.

    Attributes:
        samples: how many rows of those that are taken, from the first; all by default.
        needles: take only rows with this number of texts of one kind; all by default.
        longest: tokens of a prompt with its answer; by default what the model was trained for.
    """

    needles: Literal[2, 4, 8] | None = None
    longest: Tokens | None = None

    metric: ClassVar[str] = "match_ratio"

    @property
    def conversation(self) -> bool:
        return True

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        """Read the samples.

        Raises:
            UsageError: no data, or no row that is short enough.
            KvtoolError: data that lack a column, or hold no conversation.
        """
        longest = tokens.limit if self.longest is None else self.longest
        fitting = self._fitting(math.inf if longest is None else longest, tokens)
        found = list(islice(fitting, self.samples))
        if not found:
            row = "no row" if self.needles is None else f"no row with {self.needles} needles"
            long = "" if longest is None else f" is at most {longest} tokens long, its answer of "
            raise UsageError(
                f"{self.name}: {row} of `{self.data}`"
                + (long and f"{long}up to {_NEW_TOKENS} included"),
                hint="other rows, a model that was trained for more, or a larger `longest`",
            )
        yield from found

    def _fitting(self, longest: float, tokens: TokenCounter) -> Iterator[Sample]:
        for number, row, where in self.rows(_COLUMNS, self.name, texts=("answer",)):
            if not isinstance(row["n_needles"], int):
                raise KvtoolError(f"{where}: `n_needles` is no number: `{row['n_needles']}`")
            if self.needles not in (None, row["n_needles"]):
                continue
            if len(row["prompt"]) > _CHARACTERS * longest:
                continue
            messages, prefix = read_messages(row["prompt"], where), row["random_string_to_prepend"]
            answer = row["answer"]
            if not answer.startswith(str(prefix)):
                raise KvtoolError(f"{where}: `answer` does not begin with `{prefix}`")
            text = transcript(SPOKEN, messages) + answer
            used = tokens.special + tokens.count(text)
            if used - tokens.count(answer) + _NEW_TOKENS > longest:
                continue
            yield Sample(
                str(number),
                json.dumps(messages[:-1], ensure_ascii=False),
                (Turn(messages[-1], (answer,), _NEW_TOKENS),),
                {"needles": row["n_needles"], "length": _bin(used)},
                {"prefix": prefix},
            )

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return the ratio of difflib's SequenceMatcher, from 0 to 100."""
        return 100 * recited(said(prediction), references[0], facts["prefix"])


def read_messages(prompt: Any, where: str) -> list[str]:
    """Return what user and assistant say in turn, the user first and last.

    A system message counts as the user's; messages of one side that follow each other are joined.

    Raises:
        KvtoolError: it is no such conversation.
    """
    try:
        messages = json.loads(prompt) if isinstance(prompt, str) else prompt
        sides = [(message["role"] == "assistant", message["content"]) for message in messages]
        said = [
            (side, "\n\n".join(text for _, text in group))
            for side, group in groupby(sides, key=lambda each: each[0])
        ]
    except (TypeError, KeyError, ValueError, IndexError):
        said = []
    if len(said) < 3 or said[0][0] or said[-1][0]:
        raise KvtoolError(
            f"{where}: `prompt` is no JSON list of messages with `role` and `content` that a user "
            "begins and ends"
        )
    return [text for _, text in said]


def _bin(tokens: int) -> int:
    """Return the tokens that the longest row of a bin has; bins double, as the benchmark's do."""
    length = _SHORTEST_BIN
    while length < tokens:
        length *= 2
    return length
