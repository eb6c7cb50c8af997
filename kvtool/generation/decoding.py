"""Draw one token after another; sampling and its settings are those of transformers.

What a token costs does not depend on how many came before: ids go into a buffer that is made once,
and stop texts and streamed text look at the last tokens only. (Settings of transformers that look
at the whole text, such as a repetition penalty, do so.)
"""

from __future__ import annotations

import copy
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

from kvtool.cache.cache import KVCache
from kvtool.generation.feeding import decode_step
from kvtool.generation.finite import broken_rows, explain, explaining

_BYTES = 4  # of a character at most, and a token has one or more
_MARGIN = 8  # tokens before a stop text, for tokenizers whose first token loses a space
_HELD, _CONTEXT = 64, 16  # tokens of streamed text that are decoded again, and that stay


def decode_loop(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor,
    stopping_criteria,
    generation_config: GenerationConfig,
    *,
    next_logits: Tensor,
    kv_cache: KVCache,
    text_streamer: TextStreamer | None = None,
    generator: torch.Generator | None = None,
    kept_logits: list[Tensor] | None = None,
    step: Callable[[PreTrainedModel, KVCache, Tensor], Tensor] = decode_step,
    **unused,
) -> Tensor:
    """Sample from the logits that a prompt has left; runs inside transformers' generate.

    The host waits for a token once: it reads the tokens, whether any logits were broken and whether
    any row goes on.

    Raises:
        BrokenNumbers: the logits of a row that still runs are not finite.
    """
    written = input_ids.shape[1]
    text = input_ids.new_zeros(input_ids.shape[0], generation_config.max_length)
    text[:, :written] = input_ids
    running = torch.ones(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    padding = generation_config._pad_token_tensor
    logits = next_logits
    while True:
        if kept_logits is not None:
            kept_logits.append(logits.cpu())
        broken = broken_rows(logits)
        scores = logits_processor(text[:, :written], logits.masked_fill(broken[:, None], 0.0))
        if generation_config.do_sample:
            token = torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]
        else:
            token = scores.argmax(-1)
        if padding is not None:
            token = torch.where(running, token, padding)
        broken &= running
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


class StopsAt(StoppingCriteria):
    """Ends a row when its text from token `start` on has come to hold one of the given texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], start: int) -> None:
        self._tokenizer, self._stop, self._start = tokenizer, stop, start
        self._tokens = _BYTES * max(len(text) for text in stop) + _MARGIN

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs) -> Tensor:
        start = max(self._start, input_ids.shape[1] - self._tokens)
        texts = self._tokenizer.batch_decode(input_ids[:, start:], skip_special_tokens=True)
        done = [any(text in row for text in self._stop) for row in texts]
        return torch.tensor(done, device=input_ids.device)


class StopsWhen(StoppingCriteria):
    """Ends all rows once a function says so."""

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
        """Hand out what is held but for the last tokens, which tell how the next ones read."""
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


def drawing_settings(
    model: PreTrainedModel,
    max_new_tokens: int,
    temperature: float,
    min_new_tokens: int,
) -> GenerationConfig:
    """Return the model's own settings but for what is said here; temperature 0 samples nothing."""
    settings = copy.deepcopy(model.generation_config)
    settings.max_length, settings.max_new_tokens = None, max_new_tokens
    settings.min_new_tokens = min_new_tokens or None
    settings.num_beams = settings.num_return_sequences = 1
    settings.do_sample = temperature > 0
    if settings.do_sample:
        settings.temperature = temperature
    else:
        settings.temperature = settings.top_p = settings.top_k = settings.min_p = None
        settings.typical_p = settings.epsilon_cutoff = settings.eta_cutoff = None
    return settings


def until_end(row: list[int], model: PreTrainedModel) -> list[int]:
    """Return the tokens up to the end-of-text token, which stays, without the padding behind it."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    for i, token in enumerate(row):
        if token in ends:
            return row[: i + 1]
    return row
