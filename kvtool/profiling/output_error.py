"""Measure how far a compressed cache moves each attention layer's output (CAOTE, figure 3).

Per layer, sum over decoded steps of ||o - o'||^2 over sum of ||o||^2, where o joins all heads
before the output projection, with the full cache, and o' is the same under the policy. The paper
(https://arxiv.org/abs/2504.14051) does not say how it normalises; this is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvtool.cache.entry.build import build_cache
from kvtool.cache.hooks.attachment import attachment
from kvtool.cache.whole.cache import KVCache
from kvtool.cache.whole.replay import replay
from kvtool.errors import KvtoolError
from kvtool.generation import follow, prefill
from kvtool.profiling.seen import Seen


class _Sums:
    """Squared differences and squared lengths per layer, kept on the device."""

    def __init__(self) -> None:
        self._error: dict[int, Tensor] = {}
        self._size: dict[int, Tensor] = {}

    def add(self, layer: int, full: Tensor, ours: Tensor) -> None:
        """Add the outputs of one step, of any equal shape."""
        full, ours = full.float(), ours.float()
        zero = full.new_zeros(())
        self._error[layer] = self._error.get(layer, zero) + (full - ours).square().sum()
        self._size[layer] = self._size.get(layer, zero) + full.square().sum()

    def ratios(self) -> dict[int, float]:
        """Return one number per attention layer, in order."""
        return {i: (self._error[i] / self._size[i]).item() for i in sorted(self._size)}


class OutputError:
    """Error of every layer under each of several caches, which read the full run's layers."""

    def __init__(self, caches: Sequence[KVCache]) -> None:
        """Take empty caches, whose budgets are tokens unless they know the prompt."""
        self._caches = caches
        self._sums = [_Sums() for _ in caches]

    def see(self, seen: Seen) -> None:
        """Replay a step in every cache; only decoded tokens count."""
        for cache, sums in zip(self._caches, self._sums, strict=True):
            ours = replay(cache, seen.step, seen.call)
            if seen.decoding:
                sums.add(seen.layer, seen.out, ours)

    def results(self) -> dict[str, dict[int, Tensor]]:
        """Return (1, caches): the heads of a layer are judged together."""
        ratios = [sums.ratios() for sums in self._sums]
        return {
            "output_error": {
                layer: torch.tensor([[each[layer] for each in ratios]]) for layer in ratios[0]
            }
        }


def output_error(
    model: PreTrainedModel,
    cache: KVCache,
    prompt_ids: Tensor,
    token_ids: Tensor,
    mode: Literal["isolated", "end_to_end"] = "isolated",
) -> list[float]:
    """Measure the normalised squared error of each attention layer's output while decoding.

    Args:
        model: with kvtool's attention.
        cache: empty, of the policy in question.
        prompt_ids: (1, n) int64.
        token_ids: (1, steps) int64, the text that follows, read by both.
        mode: `isolated` gives every layer the queries, keys and values of the full run, so that
            only its own cache differs; `end_to_end` lets errors run through the layers.

    Raises:
        KvtoolError: a model whose attention is only watched, or stored in latent form.
    """
    attached = attachment(model)
    if attached is not None and attached.eager:
        raise KvtoolError(f"`{model.config.model_type}` does not show its attention outputs")
    if mode == "isolated":
        return _isolated(model, cache, prompt_ids, token_ids)
    return _end_to_end(model, cache, prompt_ids, token_ids)


def _isolated(
    model: PreTrainedModel, cache: KVCache, prompt_ids: Tensor, token_ids: Tensor
) -> list[float]:
    study, full = OutputError([cache]), build_cache(model, "full")
    full.watch_steps(lambda step, call, out: study.see(Seen(step, call, out)))
    full.expect_length(prompt_ids.shape[1] + token_ids.shape[1])
    with cache.prompt([prompt_ids.shape[1]]):
        logits = prefill(model, full, prompt_ids)
    follow(model, full, logits, _with_end(token_ids))
    return [found.item() for found in study.results()["output_error"].values()]


def _end_to_end(
    model: PreTrainedModel, cache: KVCache, prompt_ids: Tensor, token_ids: Tensor
) -> list[float]:
    outputs = [
        _outputs(model, each, prompt_ids, token_ids) for each in (build_cache(model, "full"), cache)
    ]
    sums = _Sums()
    for (index, full), (_, ours) in zip(*outputs, strict=True):
        sums.add(index, full, ours)
    return list(sums.ratios().values())


def _outputs(
    model: PreTrainedModel, cache: KVCache, prompt_ids: Tensor, token_ids: Tensor
) -> list[tuple[int, Tensor]]:
    """Return the index and the output of every layer that decodes the tokens, one by one."""
    seen: list[tuple[int, Tensor]] = []
    cache.expect_length(prompt_ids.shape[1] + token_ids.shape[1])
    logits = prefill(model, cache, prompt_ids)
    cache.watch_steps(lambda step, call, out: seen.append((step.layer.index, out)))
    follow(model, cache, logits, _with_end(token_ids))
    cache.watch_steps(None)
    return seen


def _with_end(token_ids: Tensor) -> Tensor:
    """Add a token that is never fed, so that all the given ones are."""
    return torch.cat([token_ids, token_ids[:, -1:]], 1)
