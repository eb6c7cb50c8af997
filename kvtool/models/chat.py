"""Put a conversation to a model: the text that a chat template makes of messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq
from typing import TYPE_CHECKING, Any, Literal

from kvtool.documents.messages import Message
from kvtool.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST = 64 * 2**20  # characters that a template may make of a few words
_MARKS = ("<kvtool-first>", "<kvtool-answer>", "<kvtool-second>")
_ANOTHER = Message("user", _MARKS[2])


@dataclass(frozen=True)
class Answer:
    """What a model has said.

    Attributes:
        text: without the token that ends it.
        end: the text of that token; empty if the answer was broken off.
    """

    text: str
    end: str = ""

    def cut_from(self, behind: str) -> str:
        """Leave out of a text behind the answer what the answer has said itself."""
        stripped = behind.lstrip()
        if self.end.strip() and stripped.startswith(self.end):
            return stripped[len(self.end) :]
        space = self.text[len(self.text.rstrip()) :]
        return behind.removeprefix(self.end or space)


@dataclass(frozen=True)
class Piece:
    """A text that goes on from another.

    Attributes:
        before: what it goes on from; empty: nothing is known of it.
    """

    before: str
    text: str


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
        """Return whether an answer begins inside a thought, which the template has opened."""
        return self.closing.rstrip().endswith("<think>")

    def message(self, text: str) -> str:
        """Return the template's text for a message."""
        return text.strip() if self.trims else text

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the text of messages up to where the next answer begins."""
        return self.opened(messages) + self.closing

    def opened(self, messages: Sequence[Message]) -> str:
        """Return the text of messages whose last one, of the user, may go on."""
        text = self.opening + self.message(messages[0].content)
        for each in messages[1:]:
            lead = self.given if each.role == "assistant" else self.next
            text += lead + self.message(each.content)
        return text

    def answered(self, messages: Sequence[Message]) -> str:
        """Return the text of messages up to the end of the last one, an answer that is given."""
        return self.opened(messages)

    def follow(self, messages: Sequence[Message], answer: Answer) -> Piece:
        """Return what goes on from an answer up to where the next one begins."""
        asked = self.message(messages[-1].content)
        return Piece("", answer.cut_from(self.next) + asked + self.closing)


@dataclass(frozen=True)
class TemplateFrame(Frame):
    """The frame of a chat template, which words every conversation anew as a whole.

    A template may word a message by its place, or otherwise once others follow. So the text of a
    conversation is what the template makes of all its messages, and what goes on from a text is the
    rest behind it. The texts around single messages are those of a short conversation.
    """

    tokenizer: Any = field(default=None, compare=False, repr=False)
    thinking: bool | None = field(default=None, compare=False)

    @property
    def fingerprint(self) -> str:
        """A hash of the template."""
        template = json.dumps(self.tokenizer.chat_template, sort_keys=True)
        return hashlib.sha256(template.encode()).hexdigest()

    def prompt(self, messages: Sequence[Message]) -> str:
        return _render(self.tokenizer, messages, self.thinking)

    def opened(self, messages: Sequence[Message]) -> str:
        return self._up_to_end(messages, [])

    def answered(self, messages: Sequence[Message]) -> str:
        return self._up_to_end(messages, [_ANOTHER])

    def _up_to_end(self, messages: Sequence[Message], more: Sequence[Message]) -> str:
        """Return the text up to the end of the last message, without space that may be trimmed."""
        *before, last = messages
        marked = Message(last.role, last.content + _MARKS[0])
        text = self.prompt([*before, marked, *more])
        if text.count(_MARKS[0]) != 1:
            raise _unusable("it leaves out or repeats a message")
        ended = text[: text.index(_MARKS[0])]
        return common_start(self.prompt([*messages, *more]), ended)

    def follow(self, messages: Sequence[Message], answer: Answer) -> Piece:
        return self.behind(self.prompt(messages), self.prompt(messages[:-2]), answer)

    def behind(self, whole: str, read: str, answer: Answer) -> Piece:
        """Return what goes on from an answer, which stays as the model has said it.

        Raises:
            UsageError: the text does not go on from what has been read.
        """
        text = answer.cut_from(_behind(rest_behind(whole, read), answer.text))
        return Piece(whole[: len(whole) - len(text)], text)

    def is_regular(self) -> bool:
        """Return whether the template words a message the same wherever it comes."""
        texts = ["a0", "b1", "c2", "d3", "e4"]
        talk = [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]
        plain = Frame(self.opening, self.closing, self.given, self.next)
        return all(self.prompt(talk[:n]) == plain.prompt(talk[:n]) for n in (1, 3, 5))


def read_answer(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], ends: int | Sequence[int] | None
) -> Answer:
    """Return an answer in words.

    Args:
        ids: its tokens.
        ends: the tokens that end one, beside the tokenizer's special ones.
    """

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    special = {*tokenizer.all_special_ids, *([ends] if isinstance(ends, int) else ends or [])}
    if ids and ids[-1] in special:
        return Answer(decode(ids[:-1]), decode(ids[-1:]))
    return Answer(decode(ids))


def common_start(one: str, other: str) -> str:
    """Return the text with which both begin.

    >>> common_start("tea", "ten"), common_start("a", "b"), common_start("a", "ab")
    ('te', '', 'a')
    """
    return one[: sum(1 for _ in takewhile(bool, map(eq, one, other)))]


def rest_behind(whole: str, read: str) -> str:
    """Return what is behind the text that has been read.

    Raises:
        UsageError: the text does not begin with it.
    """
    if not whole.startswith(read):
        raise _changed()
    return whole[len(read) :]


def _behind(rest: str, said: str) -> str:
    """Return what is behind an answer, around which the template may have other space."""
    text = said.strip()
    start = len(rest) - len(rest.lstrip()) if text else 0
    if not rest.startswith(text, start):
        raise _changed()
    return rest[start + len(text) :]


def _changed() -> UsageError:
    return UsageError(
        "the chat template changes messages that the cache has read once another one follows",
        hint="ask in one turn, or --chat-template off",
    )


def template_of(tokenizer: Any) -> Any:
    """Return a tokenizer's chat template: a text, or texts by name; None where it has none."""
    return getattr(tokenizer, "chat_template", None)


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
        thinking: `enable_thinking` for templates that know it; None: their own default.

    Raises:
        UsageError: a template is wanted, or needed for a system message, and there is none, or it
            cannot be used.
    """
    template = template_of(tokenizer)
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
    return _read_frame(tokenizer, system, thinking)


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], thinking: bool | None
) -> str:
    """Return what the chat template makes of messages, up to where the next answer begins."""
    options = {} if thinking is None else {"enable_thinking": thinking}
    talk = [{"role": each.role, "content": each.content} for each in messages]
    try:
        text = tokenizer.apply_chat_template(
            talk, tokenize=False, add_generation_prompt=True, **options
        )
        if len(text) > _LONGEST + sum(len(each.content) for each in messages):
            raise ValueError(
                f"it makes {len(text) >> 20} MiB of a message, {_LONGEST >> 20} at most"
            )
    except Exception as error:  # any: the template is a program of the checkpoint
        raise _unusable(str(error)) from error
    return text


def _unusable(why: str) -> UsageError:
    return UsageError(
        f"the tokenizer's chat template cannot be used: {why}", hint="--chat-template off"
    )


def _read_frame(
    tokenizer: PreTrainedTokenizerBase, system: str | None, thinking: bool | None
) -> TemplateFrame:
    """Find out what a template sets around marks in place of messages."""
    first, answer, _ = _MARKS
    before = [] if system is None else [Message("system", system)]

    def render(*talk: Message) -> str:
        return _render(tokenizer, talk, thinking)

    one = render(*before, Message("user", first))
    trims = render(*before, Message("user", f" {first} ")) == one
    opening, closing = _split(one, [first])
    if system is not None and system.strip() not in opening:
        raise _unusable("it leaves out the system message")
    # without the system message, which some templates put before the last message
    two = render(Message("user", first), Message("assistant", answer), _ANOTHER)
    _, given, between, _ = _split(two, _MARKS)
    return TemplateFrame(
        opening, closing, given, between, False, trims, tokenizer=tokenizer, thinking=thinking
    )


def _split(text: str, marks: Sequence[str]) -> list[str]:
    """Cut a text at marks that it holds once each."""
    parts = [text]
    for mark in marks:
        last = parts.pop()
        if last.count(mark) != 1:
            raise _unusable("it leaves out or repeats a message")
        parts += last.split(mark)
    return parts


def piece_ids(tokenizer: PreTrainedTokenizerBase, piece: Piece) -> list[int]:
    """Return the token ids of a piece: those that it has in the whole text, where it has its own.

    A token that reaches over the border is split, as what is before has been read.
    """
    if piece.before:
        before, whole = (
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (piece.before, piece.before + piece.text)
        )
        if whole[: len(before)] == before:
            return whole[len(before) :]
    return continued_ids(tokenizer, piece.text)


def continued_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text that goes on from another.

    Some tokenizers (Llama 2, Mistral, Phi-3) put a space in front of whatever they encode, which
    has no place inside a text; text behind a line end gets none.
    """

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    before, both = encode("\n"), encode("\n" + text)
    apart = both[: len(before)] == before  # the line end is no part of the text's first token
    return both[len(before) :] if apart else encode(text)
