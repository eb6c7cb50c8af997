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
from kvtool.errors import KvtoolError
from kvtool.generation.continuation import Compressed, Generation, compress, generate
from kvtool.models.chat import Frame, continued_ids, make_frame

_LINES = Frame(next="\n")  # without a template a line end parts what is said


class Conversation:
    """A conversation whose cache goes from turn to turn.

    A loaded cache is gone on from: inside its conversation, where its text has the chat template's
    marks or there is no template, else behind its text.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cache: KVCache,
        chat_template: Literal["auto", "on", "off"] = "auto",
    ) -> None:
        """Begin, or go on with, a conversation.

        Args:
            cache: empty, or loaded (then it knows its tokens in `input_ids`).
            chat_template: `auto` uses the tokenizer's if it has one.

        Raises:
            UsageError: a template is wanted and there is none, or it cannot be used.
            KvtoolError: the cache holds a text that it does not know.
        """
        if cache.input_ids is None and cache.get_seq_length() > 0:
            raise KvtoolError(
                "the cache does not know its text, so no conversation can go on from it",
                hint="save it with `input_ids`",
            )
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        frame = make_frame(tokenizer, chat_template, chat=True)
        self._frame = _LINES if frame == Frame() else frame
        self._behind: Literal["nothing", "context", "text", "answer"] = "nothing"
        if cache.input_ids is not None:
            text = tokenizer.decode(cache.input_ids[0], clean_up_tokenization_spaces=False)
            self._behind = "answer" if self._frame.closing in text else "text"

    def read(self, context: str) -> Compressed:
        """Feed what the first message begins with, and let the policy cut it by itself."""
        read = compress(self.model, self.cache, self._ids(self._lead() + context))
        self._behind = "context"
        return read

    def say(self, turn: UserTurn, **drawing: Any) -> Generation:
        """Feed a turn and generate what the model says to it.

        Args:
            drawing: as for `kvtool.generation.generate`.
        """
        ids = self.turn_ids(turn)
        outside = turn.verbatim and self._frame.closing and self._behind in ("nothing", "text")
        self._behind = "text" if outside else "answer"
        return generate(self.model, self.tokenizer, self.cache, ids, **drawing)

    def turn_ids(self, turn: UserTurn) -> Tensor:
        """Return what a turn feeds beside the answer before it: (1, n) int64."""
        if turn.verbatim:
            return self._ids(turn.text, special=True)
        return self._ids(self._lead() + turn.text + self._frame.closing)

    def _lead(self) -> str:
        """What comes between the text so far and what the user says."""
        if self._behind == "nothing":
            return self._frame.opening
        if self._behind == "context":
            return "\n"
        if self._behind == "text":  # which has the token that begins texts
            return self._frame.opening.removeprefix(self.tokenizer.bos_token or "")
        ended = self.tokenizer.decode(self.cache.input_ids[0, -1:])
        return self._frame.next.removeprefix(ended)  # which the answer may have said itself

    def _ids(self, text: str, *, special: bool = False) -> Tensor:
        if self._behind == "nothing":
            special = special or self._frame.special
            ids = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        else:
            ids = continued_ids(self.tokenizer, text)
        return torch.tensor([ids], dtype=torch.long, device=self.model.device)
