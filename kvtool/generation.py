"""Drive a model over a compressed cache: prompts, decoding, comparison with the full cache."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from kvtool.cache.cache import CacheReport, KVCache
from kvtool.errors import KvtoolError, UsageError


@dataclass(frozen=True)
class Fidelity:
    """How close the compressed run stays to the full cache, both reading the same tokens.

    Attributes:
        agreement: share of steps whose most likely token is the same.
        kl: mean Kullback-Leibler divergence from the full cache's distribution, in nats.
        first_divergence: first step whose most likely token differs, None if none does.
    """

    agreement: float
    kl: float
    first_divergence: int | None


@dataclass(frozen=True)
class Generation:
    """What was generated. Rows of `token_ids` and `text` hold new tokens only.

    Attributes:
        input_ids: (batch, all tokens) int64 on the CPU; the last generated token has not been fed
            to the cache.
        prompt_tokens: new tokens of the prompt, of the longest row.
        new_tokens: generated tokens, of the longest row.
    """

    token_ids: list[list[int]]
    text: list[str]
    prompt_tokens: int
    new_tokens: int
    input_ids: Tensor
    report: CacheReport
    prefill_s: float
    decode_s: float
    fidelity: Fidelity | None = None


@dataclass(frozen=True)
class Compressed:
    """A prompt whose cache has been compressed.

    Attributes:
        input_ids: (batch, all tokens) int64 on the CPU, all of them fed.
        next_logits: (batch, vocab) float32.
    """

    input_ids: Tensor
    next_logits: Tensor
    prefill_s: float


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    cache: KVCache,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Feed a prompt, or a further turn, whole or in the blocks that the cache was built for.

    In a padded batch blocks are counted from each row's own first token: the rows' padding is moved
    behind their tokens.

    Args:
        input_ids: (batch, n) new tokens only.
        attention_mask: (batch, n), 0 = padding, on any side; None: no padding.

    Returns:
        (batch, vocab) float32 logits after the last token of each row.

    Raises:
        KvtoolError: padded rows in blocks on a model with recurrent layers.
    """
    input_ids = input_ids.to(model.device)
    batch, width = input_ids.shape
    seen = [0] * batch if cache.get_seq_length() == 0 else cache.tokens_seen()
    mask = None if attention_mask is None else attention_mask.to(model.device).bool()
    if mask is not None and bool(mask.all()):
        mask = None
    counts = [width] * batch if mask is None else mask.sum(1).tolist()
    size = width if cache.block is None else min(cache.block, width)
    if mask is not None:
        if size < width and any(
            isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers
        ):
            raise KvtoolError(
                "a padded batch cannot be fed in blocks to a model with recurrent layers",
                hint="use prefill full, or rows of equal length",
            )
        if size < width:
            order = (~mask).long().argsort(dim=1, stable=True)
            input_ids, mask = input_ids.gather(1, order), mask.gather(1, order)
    logits: Tensor | None = None
    with cache.prompt([before + count for before, count in zip(seen, counts, strict=True)]):
        for start in range(0, width, size):
            part = slice(start, start + size)
            valid = None if mask is None else mask[:, part]
            last = _last_columns(valid, batch, min(size, width - start))
            out = _forward(model, cache, input_ids[:, part], valid, last)
            if logits is None or valid is None:
                logits = out
            else:
                ends_here = valid.any(1)[:, None]
                logits = torch.where(ends_here, out, logits)
    return logits


def _last_columns(valid: Tensor | None, batch: int, width: int) -> list[int]:
    if valid is None:
        return [width - 1] * batch
    columns = torch.arange(width, device=valid.device)
    return torch.where(valid, columns, -1).amax(1).clamp(min=0).tolist()


def _forward(
    model: PreTrainedModel,
    cache: KVCache,
    input_ids: Tensor,
    valid: Tensor | None,
    last: list[int] | None,
) -> Tensor:
    """One forward of new tokens.

    Args:
        last: the column of each row whose logits are wanted; None: all columns.

    Returns:
        (batch, vocab) float32 logits at one column of each row, or (batch, columns, vocab) at all.
    """
    batch, width = input_ids.shape
    past = cache.get_seq_length()
    starts = torch.tensor([0] * batch if past == 0 else cache.tokens_seen(), device=model.device)
    if valid is None:
        positions = starts[:, None] + torch.arange(width, device=model.device)
        mask = None
    else:
        positions = (starts[:, None] + valid.long().cumsum(1) - 1).clamp(min=0)
        mask = torch.cat([valid.new_ones(batch, past), valid], 1).long()
    wanted = None if last is None else sorted(set(last))
    options = {}
    if wanted and "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = torch.tensor(wanted, device=model.device)
    out = model(
        input_ids=input_ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        **options,
    ).logits
    if last is None:
        return out.float()
    columns = [wanted.index(column) for column in last] if options else last
    return out[torch.arange(batch, device=out.device), columns].float()


@torch.no_grad()
def decode_step(model: PreTrainedModel, cache: KVCache, token_ids: Tensor) -> Tensor:
    """Feed one token per row.

    Args:
        token_ids: (batch,) int64.

    Returns:
        (batch, vocab) float32 logits.
    """
    layer = cache.first_layer
    start = layer.lengths if layer.ragged else layer.seen
    positions = torch.zeros_like(token_ids)[:, None] + (start[:, None] if layer.ragged else start)
    return (
        model(
            input_ids=token_ids[:, None],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        .logits[:, -1]
        .float()
    )


@torch.no_grad()
def token_logprobs(
    model: PreTrainedModel,
    cache: KVCache,
    input_ids: Tensor,
    *,
    chunk: int,
    first_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Score given tokens, each from what the cache still holds (teacher forcing).

    The last token is scored and not fed.

    Args:
        cache: empty, or fed with what comes before.
        input_ids: (1, n) int64, new tokens only.
        chunk: tokens a forward. 1 feeds them as decoded tokens, the first token of an empty cache
            as its prompt; more feeds them as blocks of one prompt, the cache cut after each.
        first_logits: (1, vocab) logits that the cache's tokens gave; None leaves out the first
            token, which nothing predicts.

    Returns:
        Log-probabilities, (1, n) float32, and whether each token was the most likely one, (1, n)
        bool, both on the CPU; (1, n - 1) without `first_logits`.

    Raises:
        UsageError: `chunk` below 1.
    """
    if chunk < 1:
        raise UsageError(f"chunk must be 1 or more, got {chunk}")
    input_ids = input_ids.to(model.device)
    scored = []
    if first_logits is not None:
        scored.append(_score_tokens(first_logits[:, None].to(model.device), input_ids[:, :1]))
    fed, targets = input_ids[:, :-1], input_ids[:, 1:]
    empty = cache.get_seq_length() == 0
    total = input_ids.shape[1] + (0 if empty else cache.tokens_seen()[0])
    for start in range(0, fed.shape[1], chunk):
        part = slice(start, start + chunk)
        if chunk == 1 and not (empty and start == 0):
            logits = decode_step(model, cache, fed[:, start])[:, None]
        else:
            with cache.prompt([total]):
                logits = _forward(model, cache, fed[:, part], None, None)
        scored.append(_score_tokens(logits, targets[:, part]))
    if not scored:
        return torch.zeros(1, 0), torch.zeros(1, 0, dtype=torch.bool)
    logprobs, greedy = zip(*scored, strict=True)
    return torch.cat(logprobs, 1), torch.cat(greedy, 1)


def _score_tokens(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and whether it is the most likely token, on the CPU."""
    chosen = logits.gather(-1, targets[..., None])[..., 0]
    logprobs = chosen.float() - logits.float().logsumexp(-1)
    return logprobs.cpu(), (logits.argmax(-1) == targets).cpu()


def _decode_loop(
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
        logits = decode_step(model, kv_cache, token)


class _StopsAt(StoppingCriteria):
    """Ends a row once its text from token `start` on holds one of the given texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], start: int) -> None:
        self._tokenizer, self._stop, self._start = tokenizer, stop, start

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs) -> Tensor:
        texts = self._tokenizer.batch_decode(input_ids[:, self._start :], skip_special_tokens=True)
        done = [any(text in row for text in self._stop) for row in texts]
        return torch.tensor(done, device=input_ids.device)


class _Callback(TextStreamer):
    """Hands text to a function as soon as it is certain."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(text)


def compress(
    model: PreTrainedModel,
    cache: KVCache,
    prompt_ids: Tensor,
    attention_mask: Tensor | None = None,
) -> Compressed:
    """Feed a prompt and keep its compressed cache.

    Args:
        prompt_ids: (batch, n) int64.
        attention_mask: (batch, n), 0 = padding; None: no padding.

    Raises:
        UsageError: the prompt is empty.
    """
    ids, logits, seconds = _run_prompt(model, cache, prompt_ids, attention_mask)
    cache.input_ids, cache.next_logits = ids.cpu(), logits.cpu()
    return Compressed(cache.input_ids, cache.next_logits, seconds)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: KVCache,
    prompt_ids: Tensor | None,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    attention_mask: Tensor | None = None,
    on_text: Callable[[str], None] | None = None,
    compare_full: bool = False,
    stop: Sequence[str] = (),
    min_new_tokens: int = 0,
) -> Generation:
    """Generate after a prompt, after a loaded cache, or after both.

    Args:
        cache: empty, or loaded (then it knows its tokens in `input_ids`).
        prompt_ids: (batch, n) new tokens; None continues where a loaded cache ends.
        temperature: 0 takes the most likely token; above 0 samples, with the other settings of the
            model's own generation configuration.
        attention_mask: (batch, n), 0 = padding; None: no padding.
        on_text: called with pieces of text as they come; one row only.
        compare_full: also run the full cache over the same tokens and measure the difference.
        stop: texts that end a row where they come up; they stay in the text.
        min_new_tokens: before so many tokens neither the end-of-text token nor `stop` ends a row.

    Raises:
        UsageError: nothing to start from, or a comparison of padded rows.
    """
    if max_new_tokens < 1:
        raise UsageError(f"max-new-tokens must be 1 or more, got {max_new_tokens}")
    if compare_full and attention_mask is not None and not bool(attention_mask.bool().all()):
        raise UsageError("the comparison with the full cache needs rows of equal length")
    ids, logits, prefill_s = _run_prompt(model, cache, prompt_ids, attention_mask)
    kept: list[Tensor] | None = [] if compare_full else None
    start = time.perf_counter()
    everything = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=_settings(model, max_new_tokens, temperature, min_new_tokens),
        stopping_criteria=StoppingCriteriaList(
            [_StopsAt(tokenizer, stop, ids.shape[1] + min_new_tokens)] if stop else []
        ),
        custom_generate=_decode_loop,
        text_streamer=None if on_text is None else _Callback(tokenizer, on_text),
        next_logits=logits,
        kv_cache=cache,
        generator=torch.Generator(model.device).manual_seed(seed),
        kept_logits=kept,
    )
    _wait(model)
    decode_s = time.perf_counter() - start
    cache.input_ids, cache.next_logits = everything.cpu(), None
    new = [_until_end(row, model) for row in everything[:, ids.shape[1] :].tolist()]
    return Generation(
        token_ids=new,
        text=tokenizer.batch_decode(new, skip_special_tokens=True),
        prompt_tokens=0 if prompt_ids is None else prompt_ids.shape[1],
        new_tokens=max(len(row) for row in new),
        input_ids=cache.input_ids,
        report=cache.report(),
        prefill_s=prefill_s,
        decode_s=decode_s,
        fidelity=None if kept is None else _compare(model, everything, torch.stack(kept, 1)),
    )


def _run_prompt(
    model: PreTrainedModel,
    cache: KVCache,
    prompt_ids: Tensor | None,
    attention_mask: Tensor | None,
) -> tuple[Tensor, Tensor, float]:
    """Feed what has not been fed; all ids so far, the next logits and the seconds it took."""
    known = cache.input_ids
    if prompt_ids is not None and prompt_ids.shape[1] == 0:
        raise UsageError("the prompt is empty")
    if prompt_ids is None and known is None:
        raise UsageError("there is nothing to continue: no prompt, and the cache is empty")
    start = time.perf_counter()
    if known is None:
        ids = prompt_ids.to(model.device)
        logits = prefill(model, cache, ids, attention_mask)
    else:
        known = known.to(model.device)
        unfed = known[:, max(cache.tokens_seen()) :]
        if prompt_ids is not None:
            new = torch.cat([unfed, prompt_ids.to(model.device)], 1)
            ids = torch.cat([known, prompt_ids.to(model.device)], 1)
            logits = prefill(model, cache, new)
        else:
            ids = known
            logits = cache.next_logits
            for token in unfed.unbind(1):
                logits = decode_step(model, cache, token)
            if logits is None:
                raise UsageError(
                    "the saved cache has no next token to continue from; give a prompt"
                )
            logits = logits.to(model.device)
    _wait(model)
    return ids, logits, time.perf_counter() - start


def _settings(
    model: PreTrainedModel,
    max_new_tokens: int,
    temperature: float,
    min_new_tokens: int,
) -> GenerationConfig:
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


def _until_end(row: list[int], model: PreTrainedModel) -> list[int]:
    """Tokens up to the end-of-text token, which stays, without the padding behind it."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    for i, token in enumerate(row):
        if token in ends:
            return row[: i + 1]
    return row


@torch.no_grad()
def _compare(model: PreTrainedModel, input_ids: Tensor, logits: Tensor) -> Fidelity:
    """Compare the logits of a compressed run with the full cache's over the same tokens.

    Args:
        input_ids: (batch, n + new).
        logits: (batch, new, vocab) float32 of the compressed run.
    """
    new = logits.shape[1]
    options = {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = new
    full = model(
        input_ids=input_ids[:, :-1],
        past_key_values=DynamicCache(config=model.config),
        use_cache=True,
        **options,
    ).logits[:, -new:]
    return compare_logits(full.float().cpu(), logits)


def compare_logits(full: Tensor, logits: Tensor) -> Fidelity:
    """Compare two runs that read the same tokens.

    Args:
        full: (batch, steps, vocab) float32 of the full cache.
        logits: the same of the compressed run.
    """
    same = full.argmax(-1) == logits.argmax(-1)
    reference = full.log_softmax(-1)
    kl = (reference.exp() * (reference - logits.log_softmax(-1))).sum(-1).mean()
    differs = (~same.all(0)).nonzero()
    return Fidelity(
        agreement=same.float().mean().item(),
        kl=max(kl.item(), 0.0),
        first_divergence=int(differs[0]) if len(differs) else None,
    )


@torch.no_grad()
def follow(
    model: PreTrainedModel, cache: KVCache, next_logits: Tensor, token_ids: Tensor
) -> Tensor:
    """Feed known tokens one by one after a prompt, the last one excepted.

    Args:
        next_logits: (batch, vocab) that the prompt has left.
        token_ids: (batch, steps) int64.

    Returns:
        (batch, steps, vocab) float32 on the CPU: the logits from which each token would come.
    """
    logits = [next_logits.float().cpu()]
    for token in token_ids[:, :-1].unbind(1):
        logits.append(decode_step(model, cache, token.to(model.device)).cpu())
    return torch.stack(logits, 1)


def _wait(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
