"""Draw one token after another; sampling and its settings are those of transformers.

What a token costs does not depend on how many came before. Ids go into a buffer that doubles where
it is full, and stop texts and streamed text look at the last tokens only. (Settings of transformers
that look at the whole text, such as a repetition penalty, do so.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    TextStreamer,
)

from kvtool.cache.whole.cache import KVCache
from kvtool.generation.broken_numbers import broken_entries, explain, explaining
from kvtool.generation.feeding import decode_step
from kvtool.generation.model_settings import end_tokens

_FEWEST = 256  # tokens of a text's buffer
_BYTES = 4  # of a character at most, and a token has one or more
_MARGIN = 8  # tokens before a stop text, for tokenizers whose first token loses a space
_HELD, _CONTEXT = 64, 16  # tokens of streamed text that are decoded again, and that stay


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
    text_streamer: TextStreamer | None = None,
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


class StopsWhen(StoppingCriteria):
    """Ends all sequences once a function says so."""

    def __init__(self, stop_when: Callable[[], bool]) -> None:
        self._stop_when = stop_when

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs) -> Tensor:
        return torch.full((input_ids.shape[0],), self._stop_when(), device=input_ids.device)


class Callback(TextStreamer):
    """Hands text to a function as soon as it is certain."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._on_text = on_text
        self.token_cache: list[int]  # of the streamer: what is held, and how much of it is out
        self.print_len: int

    def put(self, value: Tensor) -> None:
        super().put(value)
        if len(self.token_cache) > _HELD:
            self._forget()

    def _forget(self) -> None:
        """Return the held tokens but for the last ones, which decide how the next ones read."""
        last = self.token_cache[-_CONTEXT:]
        text, rest = (
            self.tokenizer.decode(t, skip_special_tokens=True) for t in (self.token_cache, last)
        )
        if not text.endswith(rest):
            return  # the cut goes through a character; it will not after another token
        start = len(text) - len(rest)
        self.on_finalized_text(text[self.print_len : start])
        self.token_cache, self.print_len = last, max(self.print_len - start, 0)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(text)


def until_end(row: list[int], model: PreTrainedModel) -> list[int]:
    """Return the tokens up to the end-of-text token, which stays, without the padding behind it."""
    ends = end_tokens(model)
    for i, token in enumerate(row):
        if token in ends:
            return row[: i + 1]
    return row
