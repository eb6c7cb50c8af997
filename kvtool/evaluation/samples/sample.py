"""Plain data of a benchmark: contexts, questions and answers, and how a tokenizer measures text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """A question and its answers.

    Attributes:
        question: what follows the context (or the turn before), up to where the answer begins.
        references: the right answers; what they mean together is the task's affair.
        max_new_tokens: where the answer is cut off.
        answer_prefix: the beginning of the answer that the model is given. It directly follows the
            question, or the assistant's header where a chat template is used.
    """

    question: str
    references: tuple[str, ...]
    max_new_tokens: int
    answer_prefix: str = ""


@dataclass(frozen=True)
class Sample:
    """One context and what is asked about it.

    Attributes:
        id: identifies the sample in its task.
        context: read first; compressed before the question is known if queries are unknown.
        turns: asked one after the other; mostly one.
        cell: where the sample belongs in the tables (`{"length": 4096, "depth": 50}`).
        facts: further JSON values that the score needs (`{"all_classes": [..]}`).
    """

    id: str
    context: str
    turns: tuple[Turn, ...] = ()
    cell: Mapping[str, int | float | str] = field(default_factory=dict)
    facts: Json = field(default_factory=dict)


@dataclass(frozen=True)
class TokenCounter:
    """How a tokenizer measures text.

    Attributes:
        encode: text to token ids, without special tokens.
        decode: token ids to text.
        limit: positions that the model was trained for, None if it does not say.
        special: tokens that a prompt gets on top of its text (`<bos>` ..).
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    limit: int | None = None
    special: int = 1

    def count(self, text: str) -> int:
        """Return the tokens of a text, special ones excluded."""
        return len(self.encode(text))


def token_counter(tokenizer: PreTrainedTokenizerBase, limit: int | None) -> TokenCounter:
    """Return how a tokenizer measures text, for tasks that write their samples."""
    return TokenCounter(
        encode=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        limit=limit,
        special=len(tokenizer("", add_special_tokens=True)["input_ids"]),
    )
