"""Turns on one cache: what goes around each of them, and what the model says to it.

Only new tokens are fed in a turn. They are the last token of the answer before, and what the chat
template adds to the text that the cache has read. An answer of the model stays as it was generated.
The policy cuts after every turn as it does after a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvtool.cache.whole.cache import KVCache
from kvtool.documents.messages import ChatHistory, Message, UserTurn
from kvtool.errors import KvtoolError, UsageError
from kvtool.generation.continuation import Compressed, Generation, compress, generate
from kvtool.generation.repeating import instruct_chat
from kvtool.models.chat import (
    Answer,
    Frame,
    Piece,
    TemplateFrame,
    make_frame,
    piece_ids,
    read_answer,
    rest_behind,
)

_SOME_ANSWER = Answer("Yes.")
_LINES = Frame(next="\n")  # without a template a line end parts what is said


@dataclass(frozen=True)
class Asked:
    """What is fed before an answer is generated.

    Attributes:
        ids: (1, n) int64.
        messages: all that are known to have been said with it; None: they are not known.
        begun: tokens of the answer that it holds.
        goes_on: whether it goes on with the text as it is, in no message.
        outside: whether it is a text outside of the conversation.
    """

    ids: Tensor
    messages: list[Message] | None
    begun: int = 0
    goes_on: bool = False
    outside: bool = False


class Conversation:
    """A conversation whose cache goes from turn to turn.

    A loaded cache goes on where its conversation ended: in a message that is still open, behind an
    answer, or behind a text that is no conversation. One that does not record where is inside a
    conversation if its text has the chat template's marks or there is none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cache: KVCache,
        template: Literal["auto", "on", "off"] = "auto",
        system: str | None = None,
    ) -> None:
        """Begin, or go on with, a conversation.

        Args:
            cache: empty, or loaded (then it knows its tokens in `input_ids`).
            template: `auto` uses the tokenizer's if it has one.
            system: the system message, which goes before the first message.

        Raises:
            UsageError: a template is wanted and there is none, or it cannot be used; a system
                message for a conversation that has begun.
            KvtoolError: the cache holds a text that it does not know.
        """
        if cache.input_ids is None and cache.get_seq_length() > 0:
            raise KvtoolError(
                "the cache does not know its text, so no conversation can go on from it",
                hint="save it with `input_ids`",
            )
        if system is not None and cache.input_ids is not None:
            raise UsageError("a system message goes before everything, and the cache holds a text")
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        frame = make_frame(tokenizer, template, chat=True, system=system)
        self._frame = frame if isinstance(frame, TemplateFrame) else _LINES
        self._behind: Literal["nothing", "open", "text", "answer"] = "nothing"
        before = [] if system is None else [Message("system", system)]
        self._messages: list[Message] | None = before
        self._answered = 0
        if cache.input_ids is not None:
            self._recall(cache.input_ids)

    def _recall(self, known: Tensor) -> None:
        """Find out where the text of a loaded cache ended, and what has been said in it."""
        if self.cache.chat is not None:
            self._behind = self.cache.chat
        else:
            text = self.tokenizer.decode(known[0], clean_up_tokenization_spaces=False)
            self._behind = "answer" if self._frame.closing in text else "text"
        history, self._messages = self.cache.text.history, None
        if self._behind == "text":
            self._messages = []
        elif history is not None and isinstance(self._frame, TemplateFrame):
            if history.tokens != known.shape[1]:
                return
            if history.template != self._frame.fingerprint:
                raise UsageError(
                    "the chat template is not the one that the cached text was put into",
                    hint="give the tokenizer the template that it had, or --chat-template off",
                )
            self._messages, self._answered = list(history.messages), history.answer_tokens

    @property
    def in_template(self) -> bool:
        """Whether a chat template goes around what is said."""
        return self._frame is not _LINES

    def foresee(self, turns: Sequence[UserTurn], context: str | None = None) -> None:
        """Refuse turns that the template can never put behind each other, before any is answered.

        What depends on the answers (a thought that is dropped) comes to light in the turn itself.
        """
        frame, said = self._frame, self._messages
        if not isinstance(frame, TemplateFrame) or said is None or self._behind == "open":
            return
        said, read = ([] if self._answered else list(said)), ""
        for turn in turns:
            if turn.verbatim or not turn.text:
                return
            text = turn.text if context is None else f"{context}\n{turn.text}"
            said, context = [*said, Message("user", text)], None
            whole = frame.prompt(said)
            if read:
                frame.behind(whole, read, _SOME_ANSWER)
            read = "" if turn.answer is not None else whole
            answer = _SOME_ANSWER.text if turn.answer is None else turn.answer
            said.append(Message("assistant", answer))

    def read(self, context: str) -> Compressed:
        """Feed what a message begins with, and let the policy cut it by itself.

        The message stays open: what is said next goes on with it.
        """
        read = self._feed(self.context_ids(context), "")
        self._note(self._with_user(context))
        self._stand("open")
        return read

    def hear(self, turn: UserTurn) -> Compressed:
        """Feed a turn whose answer is given."""
        heard = self._feed(self.turn_ids(turn), self._frame.closing)
        self._note(self._with_turn(turn))
        self._stand("answer")
        return heard

    def say(self, turn: UserTurn, **drawing: Any) -> Generation:
        """Feed a turn and generate what the model says to it."""
        asked = self.ask(turn)
        said = generate(self.model, self.tokenizer, self.cache, asked.ids, **drawing)
        self.take(asked, len(said.token_ids[0]))
        return said

    def ask(self, turn: UserTurn) -> Asked:
        """Return what a turn feeds; `take` notes the answer once the cache has both."""
        ids = self.turn_ids(turn)
        if not turn.verbatim:
            ending = self._frame.closing + turn.begun
            instruct_chat(self.cache, self.tokenizer, self._frame, ids, ending)
        begun = ids.shape[1] - self._ids(self._piece(turn)).shape[1] if turn.begun else 0
        outside = turn.verbatim and self._frame.closing and self._behind in ("nothing", "text")
        messages: list[Message] | None
        if turn.verbatim:
            messages = [] if outside else None
        else:
            messages = self._with_turn(turn)  # now: an answer before it ends what the cache knows
        return Asked(ids, messages, begun, turn.verbatim and not outside, bool(outside))

    def ask_all(self, messages: Sequence[Message]) -> Asked:
        """Return what a whole conversation feeds to an empty cache, as `ask` does for a turn."""
        ids = self.prompt_ids(messages)
        instruct_chat(self.cache, self.tokenizer, self._frame, ids, self._frame.closing)
        said = self._messages
        return Asked(ids, None if said is None else [*said, *messages])

    def move_to(self, cache: KVCache) -> None:
        """Go on in another cache, which holds the same text."""
        self.cache = cache

    def take(self, asked: Asked, new: int) -> None:
        """Note that the cache has read what was asked, and an answer of `new` tokens."""
        if asked.goes_on:
            self._go_on(asked.ids.shape[1] + new)
        else:
            self._note(asked.messages, 0 if asked.outside else asked.begun + new)
        self._stand("text" if asked.outside else "answer")

    def answer(self, **drawing: Any) -> Generation:
        """Close the open message and answer it; behind anything else, go on."""
        if self._behind == "open" and self._frame.closing:
            return self.say(UserTurn(""), **drawing)
        said = generate(self.model, self.tokenizer, self.cache, None, **drawing)
        self._go_on(len(said.token_ids[0]))
        if self._behind in ("open", "answer"):
            self._stand(self._behind)
        return said

    def turn_ids(self, turn: UserTurn) -> Tensor:
        """Return what a turn feeds beside the answer before it: (1, n) int64.

        Raises:
            UsageError: a turn in which the user says nothing, where no message is open; a chat
                template that changes what has been read.
        """
        if turn.verbatim:
            return self._ids(Piece("", turn.text), special=True)
        if not turn.text and self._behind != "open":
            raise UsageError("an assistant message answers a message of the user, and none is open")
        piece = self._piece(turn)
        return self._ids(Piece(piece.before, piece.text + turn.begun))

    def prompt_ids(self, messages: Sequence[Message]) -> Tensor:
        """Return a whole conversation, up to where its last message is answered: (1, n) int64."""
        return self._ids(Piece("", self._frame.prompt([*(self._messages or []), *messages])))

    def context_ids(self, context: str) -> Tensor:
        """Return what the beginning of a message feeds: (1, n) int64."""
        messages = self._with_user(context)
        if messages is None:
            return self._ids(Piece("", self._lead() + self._frame.message(context)))
        return self._ids(self._beyond(self._frame.opened(messages)))

    def _piece(self, turn: UserTurn) -> Piece:
        frame, messages = self._frame, self._with_turn(turn)
        if messages is None:
            asked = self._lead() + frame.message(turn.text) if turn.text else ""
            given = "" if turn.answer is None else frame.given + frame.message(turn.answer)
            return Piece("", asked + (given or frame.closing))
        ends = turn.answer is not None
        return self._beyond(frame.answered(messages) if ends else frame.prompt(messages))

    def _beyond(self, whole: str) -> Piece:
        """Return what is behind the text that the cache has read."""
        said, frame = self._messages or [], self._frame
        if self._behind == "nothing":
            return Piece("", whole)
        if self._behind == "text":  # which has the token that begins texts
            return Piece("", whole.removeprefix(self.tokenizer.bos_token or ""))
        if self._answered and isinstance(frame, TemplateFrame):
            return frame.behind(whole, frame.prompt(said), self._last_answer(self._answered))
        read = frame.opened(said) if self._behind == "open" else frame.answered(said)
        return Piece(read, rest_behind(whole, read))

    def _with_user(self, text: str) -> list[Message] | None:
        """Return all messages, with one more or a longer one; None: they are not known."""
        if self._messages is None or not self.in_template:
            return None
        said = list(self._messages)
        if self._behind == "open":
            whole = f"{said[-1].content}\n{text}" if text else said[-1].content
            return [*said[:-1], Message("user", whole)]
        if self._answered:
            said.append(Message("assistant", self._last_answer(self._answered).text))
        return [*said, Message("user", text)]

    def _with_turn(self, turn: UserTurn) -> list[Message] | None:
        messages = self._with_user(turn.text)
        if messages is None or turn.answer is None:
            return messages
        return [*messages, Message("assistant", turn.answer)]

    def _last_answer(self, tokens: int) -> Answer:
        """Return what the model has said last, by its last tokens."""
        known = self.cache.input_ids
        ids = [] if known is None else known[0, -tokens:].tolist()
        return read_answer(self.tokenizer, ids, self.model.generation_config.eos_token_id)

    def _note(self, messages: list[Message] | None, answered: int = 0) -> None:
        """Remember what has been said, and how many tokens of an answer to it."""
        self._messages, self._answered = messages, answered

    def _go_on(self, tokens: int) -> None:
        """Remember that the last answer has gone on, or that it is unknown what has been said."""
        if self._behind == "answer" and self._answered:
            self._answered += tokens
        elif self._behind in ("open", "answer"):
            self._note(None)

    def _feed(self, ids: Tensor, ending: str) -> Compressed:
        """Feed what a turn begins with, or all of it; `ending` is the text behind what is said."""
        instruct_chat(self.cache, self.tokenizer, self._frame, ids, ending)
        return compress(self.model, self.cache, ids, tokenizer=self.tokenizer)

    def _stand(self, behind: Literal["open", "text", "answer"]) -> None:
        """Remember what the text so far ends with, in the cache, too, if in a template's words."""
        self._behind = behind
        if not isinstance(self._frame, TemplateFrame):
            return
        known, history = self.cache.input_ids, None
        if self._messages is not None and known is not None:
            print_ = self._frame.fingerprint
            history = ChatHistory(tuple(self._messages), self._answered, known.shape[1], print_)
        self.cache.end_with(None if behind == "text" else behind, history)

    def _lead(self) -> str:
        """Return what comes before what the user says, where earlier messages are unknown."""
        frame = self._frame
        if isinstance(frame, TemplateFrame) and not frame.is_regular():
            raise UsageError(
                "the chat template words a message by what was said before, and the cache does "
                "not know that",
                hint="read the text anew, or --chat-template off",
            )
        if self._behind == "nothing":
            return frame.opening
        if self._behind == "open":
            return "\n"
        if self._behind == "text":  # which has the token that begins texts
            return frame.opening.removeprefix(self.tokenizer.bos_token or "")
        return self._last_answer(1).cut_from(frame.next)

    def _ids(self, piece: Piece, *, special: bool = False) -> Tensor:
        if self._behind == "nothing":
            special = special or self._frame.special
            ids = self.tokenizer(piece.text, add_special_tokens=special)["input_ids"]
        else:
            ids = piece_ids(self.tokenizer, piece)
        return torch.tensor([ids], dtype=torch.long, device=self.model.device)
