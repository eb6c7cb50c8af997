"""Models that a server offers, by name, and the caches that requests to them begin with."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from kvtool.cache.whole.cache import KVCache
from kvtool.documents.messages import Message, UserTurn
from kvtool.engines.requests import Ask, Refused
from kvtool.errors import UsageError
from kvtool.generation.answering_thread import Held, Opened
from kvtool.generation.conversation import Asked, Conversation
from kvtool.generation.feeding import check_positions, check_tokens
from kvtool.models.chat import continued_ids, template_of
from kvtool.models.load import Loaded

_BODY = 2**16  # bytes of a request beside its text
_ESCAPED = 3  # bytes of JSON for a byte of text: `\\u00e9` for the two of `é`
_CHARACTERS, _MARGIN = 8, 64  # read of a long text for each allowed token; tokens of a cut


@dataclass(frozen=True)
class Offer:
    """A model's name: a policy and budget, and a text that conversations start from.

    Attributes:
        name: of the model.
        policy, budget: as typed, which a usage shows.
        new_cache: makes an empty cache.
        check_length: refuses a number of prompt tokens that its budget does not fit.
        sequence_bytes: forecasts the bytes of a cache from the tokens of a prompt and new ones.
        base: the text before, in its cache; None: there is none.
    """

    name: str
    policy: str
    budget: str | None
    new_cache: Callable[[], KVCache]
    check_length: Callable[[int], None]
    sequence_bytes: Callable[[int, int], int]
    base: KVCache | None = None

    @property
    def key(self) -> Hashable:
        """Conversations with the same one have the same text before, policy and budget."""
        base = None if self.base is None else self.name
        return base, self.policy, self.budget

    @property
    def base_tokens(self) -> int:
        """Tokens of the text before."""
        return 0 if self.base is None else max(self.base.tokens_seen())

    @property
    def base_bytes(self) -> int:
        """Bytes that the text before takes as long as the server runs."""
        if self.base is None:
            return 0
        report = self.base.report()
        return report.allocated_bytes + report.state_bytes

    def start(self) -> KVCache:
        """Return a cache that holds the text before, or nothing."""
        return self.new_cache() if self.base is None else self.base.copy()


@dataclass(frozen=True)
class Prompt:
    """A request in tokens.

    Attributes:
        ids: (1, n) int64 of all that it says.
        first: what it begins with where no earlier request has begun it; None: with a text before.
        sequence_bytes: of its cache at most.
    """

    offer: Offer
    ask: Ask
    ids: torch.Tensor
    max_new_tokens: int
    first: Opened | None
    sequence_bytes: int

    def held_as(self, said: str) -> Hashable:
        """Return by what the conversation is held, once `said` was the answer."""
        messages = self.ask.messages or ()
        return self.offer.key, spell((*messages, Message("assistant", said)))


def spell(messages: Sequence[Message]) -> tuple[tuple[str, str], ...]:
    """Return messages so that equal ones are read as equal tokens.

    Space around an answer is that of the template or of the client; its tokens are held anyway.
    """
    return tuple(
        (each.role, each.content.strip() if each.role == "assistant" else each.content)
        for each in messages
    )


class Opener:
    """Turns requests into tokens, and finds what they go on from."""

    def __init__(self, loaded: Loaded, longest: int | None) -> None:
        """Take how many tokens a prompt may have, a text before included; None: any number."""
        self._loaded, self._longest = loaded, longest
        fast = getattr(loaded.tokenizer, "is_fast", False)
        self._reading = contextlib.nullcontext() if fast else threading.Lock()
        self._making = threading.Lock()

    @functools.cached_property
    def most_bytes(self) -> int:
        """Bytes that the body of a request may have: those of the longest prompt, and some more."""
        if self._longest is None:
            return sys.maxsize
        widest = max(len(token.encode()) for token in self._loaded.tokenizer.get_vocab())
        return _BODY + self._longest * widest * _ESCAPED

    def _check_size(self, texts: Sequence[str]) -> None:
        """Refuse long texts by their beginning: tokens take hundreds of bytes per byte of text."""
        if self._longest is None:
            return
        text, size = "".join(texts), _CHARACTERS * self._longest
        while size < len(text):
            if len(self._loaded.tokenizer(text[:size])["input_ids"]) > self._longest + _MARGIN:
                raise self._too_long(f"more than {self._longest}")
            size *= 4

    def _new_cache(self, offer: Offer) -> KVCache:
        with self._making:  # a model may be probed for it
            return offer.new_cache()

    def _too_long(self, tokens: object) -> Refused:
        return Refused(
            f"the prompt has {tokens} tokens, and {self._longest} are allowed",
            code="context_length_exceeded",
        )

    def prepare(self, ask: Ask, offer: Offer, max_new_tokens: int) -> Prompt:
        """Turn a request into tokens, and refuse one that cannot be answered.

        Raises:
            Refused: it is longer than is allowed.
            UsageError: a template or a budget that it does not fit.
        """
        with self._reading:
            self._check_size([ask.prompt or "", *(each.content for each in ask.messages or ())])
            first, ids = self._first(ask, offer)
        tokens = ids.shape[1] + offer.base_tokens
        if self._longest is not None and tokens > self._longest:
            raise self._too_long(tokens)
        check_tokens(self._loaded.model, ids)
        check_positions(self._loaded.model, [tokens], max_new_tokens)
        if offer.base is None:
            offer.check_length(tokens)
        size = offer.sequence_bytes(tokens, max_new_tokens)
        return Prompt(offer, ask, ids, max_new_tokens, first, size)

    def _first(self, ask: Ask, offer: Offer) -> tuple[Opened | None, torch.Tensor]:
        model, tokenizer = self._loaded.model, self._loaded.tokenizer
        if ask.messages is None:
            text = ask.prompt or ""
            before = offer.base is not None
            found = continued_ids(tokenizer, text) if before else tokenizer(text)["input_ids"]
            if not found:
                raise Refused("prompt is empty for this tokenizer")
            ids = torch.tensor([found])
            return (None if before else Opened(self._new_cache(offer), Asked(ids, None))), ids
        system, messages = _parted(ask.messages)
        if system is not None and offer.base is not None:
            raise Refused(
                f"a system message goes before everything, and `{offer.name}` begins with a text"
            )
        if system is not None and not template_of(tokenizer):
            raise Refused("a system message needs a chat template, and the model has none")
        if offer.base is not None:
            _pairs(messages)
        talk = Conversation(model, tokenizer, self._new_cache(offer), system=system)
        asked = talk.ask_all(messages)
        opened = Opened(talk.cache, asked, talk) if offer.base is None else None
        return opened, asked.ids.cpu()

    def open(self, prompt: Prompt, held: Held) -> Opened:
        """Go on with the conversation that a request extends, or begin one.

        In the thread that answers.
        """
        messages = prompt.ask.messages
        if messages is not None:
            talk = held.take((prompt.offer.key, spell(messages[:-1])))
            if talk is not None:
                opened = _go_on(talk, messages[-1], prompt.max_new_tokens)
                if opened is not None:
                    return opened
        if prompt.first is not None:
            return prompt.first
        cache = prompt.offer.start()
        if messages is None:
            return Opened(cache, Asked(prompt.ids, None))
        talk = Conversation(self._loaded.model, self._loaded.tokenizer, cache)
        for asked, answer in _pairs(messages):
            talk.hear(UserTurn(asked.content, answer=answer.content))
        return Opened(cache, talk.ask(UserTurn(messages[-1].content)), talk)


def _go_on(talk: Conversation, last: Message, new: int) -> Opened | None:
    """Say one more message; None: the template has changed what was read, so it begins anew."""
    try:
        asked = talk.ask(UserTurn(last.content))
        tokens = max(talk.cache.tokens_seen()) + asked.ids.shape[1] + new + 1
        talk.cache.check_rope([tokens])
    except UsageError:
        return None
    return Opened(talk.cache, asked, talk, held=True)


def _parted(messages: Sequence[Message]) -> tuple[str | None, list[Message]]:
    """Part the system message from the others."""
    if messages[0].role == "system":
        return messages[0].content, list(messages[1:])
    return None, list(messages)


def _pairs(messages: Sequence[Message]) -> list[tuple[Message, Message]]:
    """Return messages before the last as pairs of user and assistant."""
    roles = [each.role for each in messages]
    if roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]:
        raise Refused("behind a text that is read already, user and assistant take turns")
    before = messages[:-1]
    return list(zip(before[::2], before[1::2], strict=True))
