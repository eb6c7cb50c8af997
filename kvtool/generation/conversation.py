"""Turns on one cache: what goes around each of them, and what the model says to it.

Only what is new is fed in a turn: the last token of the answer before, and the turn with its share
of the chat template, which is the text that a template sets between an answer and a message. The
policy cuts after every turn as it does after a prompt.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvtool.cache.cache import KVCache
from kvtool.documents.turns import UserTurn
from kvtool.errors import KvtoolError, UsageError
from kvtool.generation.continuation import Compressed, Generation, compress, generate
from kvtool.generation.repeating import instruct_chat
from kvtool.models.chat import Frame, continued_ids, make_frame

_LINES = Frame(next="\n")  # without a template a line end parts what is said


class Conversation:
    """A conversation whose cache goes from turn to turn.

    A loaded cache is gone on from where its conversation stands: in a message that is still open,
    behind an answer, or behind a text that is no conversation. One that does not say where it
    stands is inside a conversation if its text has the chat template's marks or there is none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cache: KVCache,
        chat_template: Literal["auto", "on", "off"] = "auto",
        system: str | None = None,
    ) -> None:
        """Begin, or go on with, a conversation.

        Args:
            cache: empty, or loaded (then it knows its tokens in `input_ids`).
            chat_template: `auto` uses the tokenizer's if it has one.
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
        frame = make_frame(tokenizer, chat_template, chat=True, system=system)
        self._frame = _LINES if frame == Frame() else frame
        self._behind: Literal["nothing", "open", "text", "answer"] = "nothing"
        if cache.chat is not None:
            self._behind = cache.chat
        elif cache.input_ids is not None:
            text = tokenizer.decode(cache.input_ids[0], clean_up_tokenization_spaces=False)
            self._behind = "answer" if self._frame.closing in text else "text"

    @property
    def in_template(self) -> bool:
        """Whether a chat template goes around what is said."""
        return self._frame is not _LINES

    def read(self, context: str) -> Compressed:
        """Feed what a message begins with, and let the policy cut it by itself.

        The message stays open: what is said next goes on with it.
        """
        read = self._feed(self.context_ids(context), "")
        self._stand("open")
        return read

    def hear(self, turn: UserTurn) -> Compressed:
        """Feed a turn whose answer is given."""
        heard = self._feed(self.turn_ids(turn), self._frame.closing)
        self._stand("answer")
        return heard

    def say(self, turn: UserTurn, **drawing: Any) -> Generation:
        """Feed a turn and generate what the model says to it.

        Args:
            drawing: as for `kvtool.generation.generate`.
        """
        ids = self.turn_ids(turn)
        if not turn.verbatim:
            instruct_chat(self.cache, self.tokenizer, self._frame, ids, self._frame.closing)
        outside = turn.verbatim and self._frame.closing and self._behind in ("nothing", "text")
        said = generate(self.model, self.tokenizer, self.cache, ids, **drawing)
        self._stand("text" if outside else "answer")
        return said

    def answer(self, **drawing: Any) -> Generation:
        """Close the open message and answer it; behind anything else, go on.

        Args:
            drawing: as for `kvtool.generation.generate`.
        """
        if self._behind == "open" and self._frame.closing:
            return self.say(UserTurn(""), **drawing)
        return generate(self.model, self.tokenizer, self.cache, None, **drawing)

    def turn_ids(self, turn: UserTurn) -> Tensor:
        """Return what a turn feeds beside the answer before it: (1, n) int64.

        Raises:
            UsageError: a turn in which the user says nothing, where no message is open.
        """
        if turn.verbatim:
            return self._ids(turn.text, special=True)
        frame = self._frame
        if not turn.text and self._behind != "open":
            raise UsageError("an assistant message answers a message of the user, and none is open")
        asked = self._lead() + frame.message(turn.text) if turn.text else ""
        if turn.answer is None:
            return self._ids(asked + frame.closing)
        return self._ids(asked + frame.given + frame.message(turn.answer))

    def context_ids(self, context: str) -> Tensor:
        """Return what the beginning of a message feeds: (1, n) int64."""
        return self._ids(self._lead() + self._frame.message(context))

    def _feed(self, ids: Tensor, ending: str) -> Compressed:
        """Feed what a turn begins with, or all of it; `ending` is the text behind what is said."""
        instruct_chat(self.cache, self.tokenizer, self._frame, ids, ending)
        return compress(self.model, self.cache, ids, tokenizer=self.tokenizer)

    def _stand(self, behind: Literal["open", "text", "answer"]) -> None:
        """Remember what the text so far ends with, in the cache, too, if in a template's words."""
        self._behind = behind
        if self.in_template:
            self.cache.end_with(None if behind == "text" else behind)

    def _lead(self) -> str:
        """Return what comes between the text so far and what the user says."""
        if self._behind == "nothing":
            return self._frame.opening
        if self._behind == "open":
            return "\n"
        if self._behind == "text":  # which has the token that begins texts
            return self._frame.opening.removeprefix(self.tokenizer.bos_token or "")
        known = self.cache.input_ids
        ended = "" if known is None else self.tokenizer.decode(known[0, -1:])
        return self._frame.next.removeprefix(ended)  # which the answer may have said itself

    def _ids(self, text: str, *, special: bool = False) -> Tensor:
        if self._behind == "nothing":
            special = special or self._frame.special
            ids = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        else:
            ids = continued_ids(self.tokenizer, text)
        return torch.tensor([ids], dtype=torch.long, device=self.model.device)
