"""Feed a known text and see how likely it is after what the cache still holds (teacher forcing)."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvtool.cache.whole.cache import KVCache
from kvtool.generation.broken_numbers import broken_entries, check_logits, explain, explaining
from kvtool.generation.feeding import forward
from kvtool.generation.graphs import StaticDecoding


def token_logprobs(
    model: PreTrainedModel,
    cache: KVCache,
    input_ids: Tensor,
    *,
    chunk: int,
    first_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Score given tokens, each from what the cache still holds (teacher forcing).

    Args:
        input_ids, chunk, first_logits: as for `token_scores`.

    Returns:
        Log-probabilities, (1, n) float32, and whether each token was the most likely one, (1, n)
        bool, both on the CPU; (1, n - 1) without `first_logits`.
    """
    logprobs, likeliest = token_scores(
        model, cache, input_ids, chunk=chunk, first_logits=first_logits
    )
    targets = input_ids[:, input_ids.shape[1] - likeliest.shape[1] :]
    return logprobs, likeliest == targets.cpu()


@torch.no_grad()
def token_scores(
    model: PreTrainedModel,
    cache: KVCache,
    input_ids: Tensor,
    *,
    chunk: int,
    first_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Score given tokens, and find the most likely token in the place of each.

    The last token is scored and not fed.

    Args:
        cache: empty, or fed with what comes before.
        input_ids: (1, n) int64, new tokens only.
        chunk: tokens a forward. 1 feeds them as decoded tokens, the first token of an empty cache
            as its prompt. More feeds them as blocks of one prompt, the cache cut after each.
        first_logits: (1, vocab) logits that the cache's tokens gave; None leaves out the first
            token, which nothing predicts.

    Returns:
        Log-probabilities, (1, n) float32, and the most likely tokens, (1, n) int64, both on the
        CPU; (1, n - 1) without `first_logits`.
    """
    input_ids = input_ids.to(model.device)
    scored = []
    if first_logits is not None:
        scored.append(_score_tokens(first_logits[:, None].to(model.device), input_ids[:, :1]))
    fed, targets = input_ids[:, :-1], input_ids[:, 1:]
    empty = cache.get_seq_length() == 0
    total = input_ids.shape[1] + (0 if empty else cache.tokens_seen()[0])
    steps = StaticDecoding(model, fed.shape[1] if chunk == 1 else 0)
    with explaining(model, input_ids):
        for start in range(0, fed.shape[1], chunk):
            part = slice(start, start + chunk)
            if chunk == 1 and not (empty and start == 0):
                logits = steps.feed(cache, fed[:, start])[:, None]
            else:
                with cache.prompt([total]):
                    logits = forward(model, cache, fed[:, part], None, None)
            scored.append(_score_tokens(logits, targets[:, part]))
    if not scored:
        return torch.zeros(1, 0), torch.zeros(1, 0, dtype=torch.int64)
    logprobs, likeliest = (torch.cat(parts, 1) for parts in zip(*scored, strict=True))
    if bool(logprobs.isnan().any()):
        raise explain(model, input_ids)
    return logprobs, likeliest


def _score_tokens(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target, and the most likely token, on the CPU."""
    chosen = logits.gather(-1, targets[..., None])[..., 0]
    logprobs = chosen.float() - logits.float().logsumexp(-1)
    logprobs = logprobs.masked_fill(broken_entries(logits), float("nan"))
    return logprobs.cpu(), logits.argmax(-1).cpu()


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
    logits, steps = [next_logits.float().cpu()], StaticDecoding(model, token_ids.shape[1])
    with explaining(model, token_ids):
        for token in token_ids[:, :-1].unbind(1):
            logits.append(steps(model, cache, token.to(model.device)).cpu())
    followed = torch.stack(logits, 1)
    check_logits(model, followed, token_ids)
    return followed
