"""Draw one token after another; sampling and its settings are those of transformers.

What a token costs does not depend on how many came before. Ids go into a buffer that doubles where
it is full, and stop texts and streamed text look at the last tokens only. (Settings of transformers
that look at the whole text, such as a repetition penalty, do so.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
)

from kvtool.cache.whole.cache import KVCache
from kvtool.generation.broken_numbers import broken_entries, explain, explaining
from kvtool.generation.feeding import decode_step
from kvtool.generation.model_settings import end_tokens

_FEWEST = 256  # tokens of a text's buffer
_BYTES = 4  # of a character at most, and a token has one or more
_MARGIN = 8  # tokens before a stop text, for tokenizers whose first token loses a space
_HELD, _CONTEXT = 64, 16  # tokens of streamed text that are decoded again, and that stay
_CLEANED = 32  # characters at the end of a text that the clean-up of spaces may still change
_BYTE = re.compile("<0x[0-9A-F]{2}>")


@torch.no_grad()
def decode_loop(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Callable[[Tensor, Tensor], Tensor],
    stopping_criteria: Callable[[Tensor, Tensor | None], Tensor],
    generation_config: GenerationConfig,
    *,
    next_logits: Tensor,
    kv_cache: KVCache,
    text_streamer: Callback | None = None,
    generator: torch.Generator | None = None,
    kept_logits: list[Tensor] | None = None,
    step: Callable[[PreTrainedModel, KVCache, Tensor], Tensor] = decode_step,
) -> Tensor:
    """Sample from the logits that a prompt has left.

    The host waits for a token once: it reads the tokens, whether any logits were broken and whether
    any sequence goes on.

    Args:
        input_ids: (batch, n) the text so far.
        logits_processor, stopping_criteria, generation_config: what transformers has made of the
            settings for it (`kvtool.generation.model_settings.prepare`).

    Returns:
        (batch, more) the text and what follows it.

    Raises:
        BrokenNumbers: the logits of a sequence that still runs are not finite.
    """
    written = input_ids.shape[1]
    text = longer(input_ids, generation_config.max_length)
    running = torch.ones(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    padding = generation_config._pad_token_tensor
    logits = next_logits
    while True:
        if kept_logits is not None:
            kept_logits.append(logits.cpu())
        broken = broken_entries(logits)
        scores = logits_processor(text[:, :written], logits.masked_fill(broken[:, None], 0.0))
        if generation_config.do_sample:
            token = torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]
        else:
            token = scores.argmax(-1)
        if padding is not None:
            token = torch.where(running, token, padding)
        broken &= running
        if written == text.shape[1]:
            text = longer(text, generation_config.max_length)
        text[:, written] = token
        written += 1
        running = running & ~stopping_criteria(text[:, :written], None)
        read = torch.cat([token, broken, running]).view(3, -1).cpu()
        if read[1].any():
            row = int(read[1].nonzero()[0])
            raise explain(model, text[row : row + 1, : written - 1])
        if text_streamer is not None:
            text_streamer.put(read[0])
        if not read[2].any():
            if text_streamer is not None:
                text_streamer.end()
            return text[:, :written]
        with explaining(model, text[:, :written]):
            logits = step(model, kv_cache, token)


def longer(text: Tensor, most: int) -> Tensor:
    """Return a text in a buffer of twice its length, and no more than it can come to."""
    rows, tokens = text.shape
    buffer = text.new_zeros(rows, min(most, max(2 * tokens, _FEWEST)))
    buffer[:, :tokens] = text
    return buffer


class StopsAt(StoppingCriteria):
    """Ends a sequence when its text from token `start` on holds one of the given texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], start: int) -> None:
        self._tokenizer, self._stop, self._start = tokenizer, stop, start
        self._tokens = _BYTES * max(len(text) for text in stop) + _MARGIN

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs) -> Tensor:
        start = max(self._start, input_ids.shape[1] - self._tokens)
        texts = self._tokenizer.batch_decode(input_ids[:, start:], skip_special_tokens=True)
        done = [any(text in row for text in self._stop) for row in texts]
        return torch.tensor(done, device=input_ids.device)


class StopText:
    """Cuts an answer where the first of its stop texts begins."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts, self._waiting, self.found = tuple(texts), "", False

    def cut(self, text: str) -> str:
        """Return a whole text up to the first stop text."""
        places = [place for place in (text.find(stop) for stop in self._texts) if place >= 0]
        return text[: min(places)] if places else text

    def feed(self, text: str, write: Callable[[str], None]) -> None:
        """Write what cannot be the beginning of a stop text."""
        if self.found:
            return
        known = self._waiting + text
        cut = self.cut(known)
        self.found = cut != known
        keep = 0 if self.found else self._open(cut)
        self._waiting = cut[len(cut) - keep :]
        if len(cut) > keep:
            write(cut[: len(cut) - keep])

    def end(self, write: Callable[[str], None]) -> None:
        """Write what has waited."""
        if self._waiting:
            write(self._waiting)
        self._waiting = ""

    def _open(self, text: str) -> int:
        """Count the characters at the end that a stop text may begin with."""
        longest = max(map(len, self._texts), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((n for n in sizes if any(s.startswith(text[-n:]) for s in self._texts)), 0)


class StopsWhen(StoppingCriteria):
    """Ends all sequences once a function says so."""

    def __init__(self, stop_when: Callable[[], bool]) -> None:
        self._stop_when = stop_when

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs) -> Tensor:
        return torch.full((input_ids.shape[0],), self._stop_when(), device=input_ids.device)


class Callback:
    """Hands text to a function as soon as no later token can change it.

    The pieces add up to the text of all tokens at once. So a piece waits for what completes its
    last character, and bytes of a byte fallback for the end of their run, which reads as one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        on_text: Callable[[str], None],
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer, self._on_text, self._skip = tokenizer, on_text, skip_special_tokens
        self._tokens: list[int] = []  # that are decoded again, the last of which are new
        self._told = 0  # characters of their text that have been handed on
        self._run = 0  # tokens at their end that are bytes
        self._open = _CLEANED if tokenizer.clean_up_tokenization_spaces else 0
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._left_out = special.union(tokenizer.all_special_ids) if skip_special_tokens else set()

    def put(self, tokens: Tensor) -> None:
        """Take (n,) new tokens."""
        for token in tokens.tolist():
            name = str(self._tokenizer.convert_ids_to_tokens(token))
            goes_on = _BYTE.fullmatch(name) or (self._run and token in self._left_out)
            self._run = self._run + 1 if goes_on else 0
            self._tokens.append(token)
        certain = self._decode(self._tokens[: len(self._tokens) - self._run])
        self._tell(certain, len(certain.removesuffix("\ufffd")) - self._open)
        if len(self._tokens) - self._run > _HELD:
            self._forget()

    def end(self) -> None:
        """Hand on all that is left."""
        text = self._decode(self._tokens)
        self._tell(text, len(text))
        self._tokens, self._told, self._run = [], 0, 0

    def _tell(self, text: str, end: int) -> None:
        if end > self._told:
            self._on_text(text[self._told : end])
            self._told = end

    def _forget(self) -> None:
        """Drop all tokens but the last ones, which decide how the next ones read."""
        last = self._tokens[-_CONTEXT - self._run :]
        text, rest = self._decode(self._tokens), self._decode(last)
        before = len(text) - len(rest)
        if rest and text.endswith(rest) and before <= self._told:
            self._tokens, self._told = last, self._told - before

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip)


def until_end(row: list[int], model: PreTrainedModel) -> list[int]:
    """Return the tokens up to the end-of-text token, which stays, without the padding behind it."""
    ends = end_tokens(model)
    for i, token in enumerate(row):
        if token in ends:
            return row[: i + 1]
    return row
