"""Hold forwards, and calls of `generate`, to the cache that they were given.

A model that sets its cache aside and goes on with one of its own is refused. Phi-3 and its like do
so where the text outgrows their RoPE; a kvtool cache has chosen for it, and the call goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache

from kvtool.cache.hooks.replacement import Replacement
from kvtool.cache.whole.cache import KVCache
from kvtool.errors import KvtoolError
from kvtool.transformers_versions import given_cache, returned_cache

_LOCAL = threading.local()


# ---- forwards


def check_returned(module: nn.Module, cache: KVCache, output: Any) -> None:
    """Refuse the output of a forward that has gone on with another cache than it was given."""
    returned = returned_cache(output)
    if isinstance(output, tuple):
        returned = next((each for each in output if isinstance(each, Cache)), None)
    if returned is not None and returned is not cache:
        raise set_aside(module)


def set_aside(module: nn.Module) -> KvtoolError:
    """Return the error of a model that goes on without its cache."""
    return KvtoolError(
        f"`{type(module).__name__}` set aside the kvtool cache that it was given, "
        "so nothing would be compressed from here on",
        hint="this model needs a cache of its own",
    )


# ---- calls of `generate`


@contextmanager
def holding(model: PreTrainedModel, cache: KVCache | None) -> Iterator[None]:
    """Hold the call of `generate` inside to a cache; None: it may use any."""
    calls = _LOCAL.__dict__.setdefault("calls", [])
    calls.append((model, cache))
    before = None if cache is None else cache.get_seq_length()
    try:
        yield
        if cache is not None and cache.get_seq_length() == before:
            raise set_aside(model)
    finally:
        calls.pop()


class PreparedInputs(Replacement):
    """Replaces `prepare_inputs_for_generation`: looks at the cache of a call's forwards."""

    method = "prepare_inputs_for_generation"

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        calls: list[tuple[PreTrainedModel, KVCache | None]] = getattr(_LOCAL, "calls", [])
        model, cache = calls[-1] if calls else (None, None)
        if cache is None or model is not self.model:
            return self.own(*args, **kwargs)
        given = dict(zip(self.__signature__.parameters, args, strict=False)) | kwargs
        before: object = given_cache(given)
        if before is not cache:
            raise set_aside(model)
        inputs = self.own(*args, **kwargs)
        if _without(inputs, cache) and cache.rope.chosen is not None:
            # the model means to read the text again by other factors; the cache needs no others
            inputs = GenerationMixin.prepare_inputs_for_generation(self.model, *args, **kwargs)
        if _without(inputs, cache):
            raise set_aside(model)
        return inputs


def _without(inputs: dict[str, Any], cache: KVCache) -> bool:
    """Whether a forward would run over another cache, or none."""
    passed: object = given_cache(inputs)
    return passed is not cache
