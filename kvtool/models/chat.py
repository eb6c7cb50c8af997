"""How a conversation is put to a model: what a chat template sets around messages, as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvtool.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKS = ("<kvtool-first>", "<kvtool-answer>", "<kvtool-second>")


@dataclass(frozen=True)
class Frame:
    """The text around the parts of a conversation; empty without a chat template.

    Attributes:
        opening: before the first message.
        closing: after a message, where the answer begins.
        next: after an answer, before the next message.
        special: whether the tokenizer's special tokens go in front of the text.
    """

    opening: str = ""
    closing: str = ""
    next: str = ""
    special: bool = True


def make_frame(
    tokenizer: PreTrainedTokenizerBase, wanted: Literal["auto", "on", "off"], chat: bool
) -> Frame:
    """Return what goes around messages.

    Args:
        wanted: `auto` uses the tokenizer's chat template if it has one and the task takes one.
        chat: whether the task takes one.

    Raises:
        UsageError: a template is wanted and there is none, or it cannot be used.
    """
    template = getattr(tokenizer, "chat_template", None)
    if wanted == "on" and not template:
        raise UsageError(
            "the tokenizer has no chat template", hint="--chat-template auto uses one if there is"
        )
    if wanted == "off" or not template or (wanted == "auto" and not chat):
        return Frame()
    first, answer, second = _MARKS
    user, model = {"role": "user", "content": first}, {"role": "assistant", "content": answer}
    again = {"role": "user", "content": second}
    try:
        one = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
        two = tokenizer.apply_chat_template(
            [user, model, again], tokenize=False, add_generation_prompt=True
        )
        opening, closing = one.split(first)
        between = two[two.index(answer) + len(answer) : two.index(second)]
    except Exception as error:  # any: the template is a program of the checkpoint
        raise UsageError(
            f"the tokenizer's chat template cannot be used: {error}", hint="--chat-template off"
        ) from error
    return Frame(opening, closing, between, special=False)


def continued_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text that goes on from another.

    Some tokenizers (Llama 2, Mistral, Phi-3) put a space in front of whatever they encode, which
    has no place inside a text; what stands behind a line end gets none.
    """

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    before, both = encode("\n"), encode("\n" + text)
    apart = both[: len(before)] == before  # the line end is no part of the text's first token
    return both[len(before) :] if apart else encode(text)
