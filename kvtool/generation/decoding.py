"""Draw one token after another; sampling and its settings are those of transformers."""

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


def decode_loop(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor,
    stopping_criteria,
    generation_config: GenerationConfig,
    text_streamer: TextStreamer | None = None,
    next_logits: Tensor | None = None,
    kv_cache: KVCache | None = None,
    generator: torch.Generator | None = None,
    kept_logits: list[Tensor] | None = None,
    step: Callable[[PreTrainedModel, KVCache, Tensor], Tensor] = decode_step,
    **unused,
) -> Tensor:
    """Sample from the logits that a prompt has left; runs inside transformers' generate."""
    running = torch.ones(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    padding = generation_config._pad_token_tensor
    logits = next_logits
    while True:
        if kept_logits is not None:
            kept_logits.append(logits.cpu())
        scores = logits_processor(input_ids, logits)
        if generation_config.do_sample:
            token = torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]
        else:
            token = scores.argmax(-1)
        if padding is not None:
            token = torch.where(running, token, padding)
        input_ids = torch.cat([input_ids, token[:, None]], 1)
        if text_streamer is not None:
            text_streamer.put(token.cpu())
        running = running & ~stopping_criteria(input_ids, None)
        if not running.any():
            if text_streamer is not None:
                text_streamer.end()
            return input_ids
        logits = step(model, kv_cache, token)


class StopsAt(StoppingCriteria):
    """Ends a row once its text from token `start` on holds one of the given texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], start: int) -> None:
        self._tokenizer, self._stop, self._start = tokenizer, stop, start

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs) -> Tensor:
        texts = self._tokenizer.batch_decode(input_ids[:, self._start :], skip_special_tokens=True)
        done = [any(text in row for text in self._stop) for row in texts]
        return torch.tensor(done, device=input_ids.device)


class Callback(TextStreamer):
    """Hands text to a function as soon as it is certain."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(text)


def drawing_settings(
    model: PreTrainedModel,
    max_new_tokens: int,
    temperature: float,
    min_new_tokens: int,
) -> GenerationConfig:
    """The model's own settings, except for what is said here; temperature 0 samples nothing."""
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
    """Tokens up to the end-of-text token, which stays, without the padding behind it."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    for i, token in enumerate(row):
        if token in ends:
            return row[: i + 1]
    return row
