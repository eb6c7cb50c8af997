"""Watch a model's own logits, for policies that go by them.

A hook before the model's forward lets the cache make room for the new tokens and asks for the
logits of all of them; a hook after it shows these to the cache, and hands on those that the caller
had asked for.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvtool.cache.cache import KVCache
from kvtool.errors import KvtoolError

_KEEP = "logits_to_keep"


def install(model: PreTrainedModel) -> list:
    """Hook a model with a language head.

    Returns:
        Handles whose `remove` undoes it.
    """
    names = list(inspect.signature(model.forward).parameters)

    @torch.no_grad()
    def before(module: PreTrainedModel, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        given = dict(zip(names, args, strict=False)) | kwargs
        cache = _watching(given)
        if cache is None:
            return None
        if given.get("input_ids") is None:
            raise KvtoolError(
                f"policy `{cache.policy.score.name}` goes by token ids, "
                "and this forward has embeddings only"
            )
        cache.expect(given["input_ids"], given.get("attention_mask"))
        if _KEEP not in given:
            return None
        cache.logits_asked = given[_KEEP]
        return (), given | {_KEEP: 0}

    @torch.no_grad()
    def after(module: PreTrainedModel, args: tuple, kwargs: dict, output: Any) -> Any:
        cache = _watching(dict(zip(names, args, strict=False)) | kwargs)
        if cache is None:
            return None
        logits = getattr(output, "logits", None)
        if logits is None:
            raise KvtoolError(
                f"policy `{cache.policy.score.name}` goes by logits, and this forward returns none",
                hint="call the attached model itself, with return_dict=True",
            )
        cache.surprisals.learn(logits)
        asked, cache.logits_asked = cache.logits_asked, 0
        output.logits = _asked_for(logits, asked)
        return output

    return [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ]


def _watching(given: dict[str, Any]) -> KVCache | None:
    """The cache of a forward, if its policy goes by logits."""
    cache = given.get("past_key_values")
    if isinstance(cache, KVCache) and cache.surprisals is not None:
        return cache
    return None


def _asked_for(logits: Tensor, asked: int | Tensor) -> Tensor:
    """The columns that transformers' `logits_to_keep` selects."""
    if isinstance(asked, int):
        return logits if asked == 0 else logits[:, -asked:]
    return logits[:, asked]
