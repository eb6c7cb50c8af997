"""How a conversation is put to a model: what a chat template sets around messages, as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvtool.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST = 64 * 2**20  # characters that a template may make of a few words
_MARKS = ("<kvtool-first>", "<kvtool-answer>", "<kvtool-second>")


@dataclass(frozen=True)
class Frame:
    """The text around the parts of a conversation; empty without a chat template.

    Attributes:
        opening: before the first message of the user; a system message is part of it.
        closing: after a message, where the answer begins.
        given: after a message, before an answer that is given, not generated.
        next: after an answer, before the next message.
        special: whether the tokenizer's special tokens go in front of the text.
        trims: whether messages lose the space around them, as the template has it.
    """

    opening: str = ""
    closing: str = ""
    given: str = ""
    next: str = ""
    special: bool = True
    trims: bool = False

    @property
    def thinks(self) -> bool:
        """Tell whether an answer begins inside a thought, which the template has opened."""
        return self.closing.rstrip().endswith("<think>")

    def message(self, text: str) -> str:
        """Return what stands in the template for a message."""
        return text.strip() if self.trims else text


def make_frame(
    tokenizer: PreTrainedTokenizerBase,
    wanted: Literal["auto", "on", "off"],
    chat: bool,
    system: str | None = None,
    thinking: bool | None = None,
) -> Frame:
    """Return what goes around messages.

    Args:
        wanted: `auto` uses the tokenizer's chat template if it has one and the task takes one.
        chat: whether the task takes one.
        system: the system message.
        thinking: what templates that know `enable_thinking` are told; None: their own default.

    Raises:
        UsageError: a template is wanted, or needed for a system message, and there is none, or it
            cannot be used.
    """
    template = getattr(tokenizer, "chat_template", None)
    if wanted == "on" and not template:
        raise UsageError(
            "the tokenizer has no chat template", hint="--chat-template auto uses one if there is"
        )
    if wanted == "off" or not template or (wanted == "auto" and not chat):
        if system is not None:
            why = "it is off" if template else "the tokenizer has none"
            raise UsageError(
                f"a system message needs a chat template, and {why}",
                hint="put its text at the beginning of the prompt",
            )
        return Frame()
    try:
        return _read_frame(tokenizer, system, thinking)
    except Exception as error:  # any: the template is a program of the checkpoint
        raise UsageError(
            f"the tokenizer's chat template cannot be used: {error}", hint="--chat-template off"
        ) from error


def _read_frame(
    tokenizer: PreTrainedTokenizerBase, system: str | None, thinking: bool | None
) -> Frame:
    """Find out what a template sets around marks in place of messages."""
    first, answer, second = _MARKS
    spaced = f" {first} "
    told_thinking = {} if thinking is None else {"enable_thinking": thinking}

    def render(*talk: tuple[str, str]) -> str:
        messages = [{"role": role, "content": text} for role, text in talk]
        told = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **told_thinking
        )
        if len(told) > _LONGEST:
            raise ValueError(
                f"it makes {len(told) >> 20} MiB of a message, {_LONGEST >> 20} at most"
            )
        return told

    one = render(*([] if system is None else [("system", system)]), ("user", spaced))
    trims = spaced not in one
    opening, closing = one.split(first if trims else spaced)
    if system is not None and system.strip() not in opening:
        raise ValueError("it leaves out the system message")
    # without the system message, which some templates put before the last message
    two = render(("user", first), ("assistant", answer), ("user", second))
    given = two[two.index(first) + len(first) : two.index(answer)]
    between = two[two.index(answer) + len(answer) : two.index(second)]
    return Frame(opening, closing, given, between, special=False, trims=trims)


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
