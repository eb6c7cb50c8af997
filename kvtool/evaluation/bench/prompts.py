"""Put a question to a model: a context, truncated in the middle, and the question about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvtool.documents.messages import Message
from kvtool.errors import KvtoolError
from kvtool.models.chat import Frame, common_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvtool.evaluation.samples.sample import Sample

SPOKEN = Frame(
    opening="User: ", closing="\n\nAssistant:", given="\n\nAssistant: ", next="\n\nUser: "
)
"""The text around messages where there is no chat template."""


@dataclass(frozen=True)
class Prompt:
    """The text of a sample's first turn, in two parts.

    Attributes:
        context: up to the end of what can be read before the question is known.
        question: the rest, up to where the answer begins.
        special: whether the tokenizer's special tokens go in front of the text.
        before: messages before the user's.
        said: what the user's message says before the question.
    """

    context: str
    question: str
    special: bool
    before: tuple[Message, ...] = ()
    said: str = ""

    def messages(self, question: str) -> list[Message]:
        """Return the messages up to a question about the context."""
        return [*self.before, Message("user", self.said + question)]


def first_prompt(
    tokenizer: PreTrainedTokenizerBase,
    frame: Frame,
    sample: Sample,
    *,
    max_length: int | None,
    truncate: Literal["middle", "left", "error"],
    conversation: bool = False,
) -> Prompt:
    """Put the first turn of a sample into words, cut to `max_length` tokens if it is longer.

    As in LongBench, the plain text is cut before a chat template goes around it. The first and the
    last half of the tokens are decoded and joined, so that the final length is about, not exactly,
    `max_length`. Other than there, the question is never cut: one of more than half of the tokens
    leaves less than half to the context, which then keeps its beginning.

    Args:
        conversation: whether the context is the JSON list of messages, of user and assistant in
            turn; such a one is never cut.

    Raises:
        KvtoolError: the prompt is too long and may not be cut, or its question alone is too long.
    """
    turn = sample.turns[0]
    context, question = sample.context, turn.question + turn.answer_prefix
    before: list[Message] = []
    if conversation:
        before, context = as_messages(json.loads(context)), ""
        framed = frame.prompt([*before, Message("user", "")])
        framed = framed.removeprefix(frame.opening).removesuffix(frame.closing)
        if max_length is not None:
            _shorten(tokenizer, framed, question, max_length, "error")
    elif max_length is not None:
        context = _shorten(tokenizer, context, question, max_length, truncate)
    whole = frame.prompt([*before, Message("user", context + turn.question)])
    read = common_start(whole, frame.opened([*before, Message("user", context)]))
    rest = whole[len(read) :] + turn.answer_prefix
    return Prompt(read, rest, frame.special, tuple(before), context)


def as_messages(texts: Sequence[str]) -> list[Message]:
    """Return what user and assistant say in turn, the user first."""
    return [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]


def spoken(frame: Frame) -> Frame:
    """Return a frame that says who speaks: words, where there is no chat template."""
    return SPOKEN if frame == Frame() else frame


def transcript(frame: Frame, messages: Sequence[str]) -> str:
    """Put a conversation into one text, up to where the next answer begins.

    Args:
        messages: of user and assistant in turn, the last one the user's.
    """
    return frame.prompt(as_messages(messages))


def _shorten(
    tokenizer: PreTrainedTokenizerBase,
    context: str,
    question: str,
    max_length: int,
    truncate: Literal["middle", "left", "error"],
) -> str:
    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    total = len(encode(context + question))
    if total <= max_length:
        return context
    if truncate == "error":
        raise KvtoolError(f"the prompt has {total} tokens, above the {max_length} allowed")
    asked, ids = len(encode(question)), encode(context)
    left = max_length - asked
    if left < 1:
        raise KvtoolError(
            f"the question alone has {asked} tokens, of {max_length} allowed",
            hint="a larger --max-length",
        )
    head = min(max_length // 2, left) if truncate == "middle" else 0
    return decode(ids[:head]) + decode(ids[len(ids) - (left - head) :])


def text_before(stop: Sequence[str], text: str, *, start: int = 0) -> str:
    """Cut a text before the first of some texts in it, looked for from character `start` on."""
    found = [text.find(mark, start) for mark in stop if mark]
    return text[: min((at for at in found if at >= 0), default=len(text))]
