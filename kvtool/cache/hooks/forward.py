"""What happens before and after every forward over a kvtool cache.

A forward that is told not to use its cache is refused, and so is one over a cache that another
forward has left changed in some layers only, and one that sets its cache aside. Policies that go by
logits, or by places in the cache, have their say here.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvtool.cache.cache import KVCache
from kvtool.cache.hooks.logits import answer_logits, ask_logits
from kvtool.cache.hooks.masks import PACKED, check_packed, read_mask
from kvtool.cache.hooks.position_ids import check_running, place
from kvtool.cache.hooks.same_cache import check_returned, set_aside
from kvtool.cache.hooks.training import check_training
from kvtool.cache.steps.pending import IMPLEMENTATION, forget_pending
from kvtool.cache.steps.shared_kv import forget_shared_kv
from kvtool.errors import KvtoolError, UsageError

_LOCAL = threading.local()  # of the running forward: what its cache had seen before


def install(model: PreTrainedModel) -> list[RemovableHandle]:
    """Hook a model, and its decoder, which may be called alone.

    Returns:
        Handles whose `remove` undoes it.
    """
    decoder = model.get_decoder()
    return [
        model.register_forward_pre_hook(_before_model, with_kwargs=True),
        decoder.register_forward_pre_hook(_before_decoder, with_kwargs=True),
        decoder.register_forward_hook(_after_decoder, with_kwargs=True),
        model.register_forward_hook(_after_model, with_kwargs=True),
    ]


@torch.no_grad()
def _before_model(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    given, cache = _given(module, args, kwargs)
    if cache is None:
        return None
    _LOCAL.begun = id(cache), cache.slot_layers[0].seen
    if cache.surprisals is None:
        return None
    _note_mask(cache, given)
    cache.begin_forward()
    return ask_logits(cache, given)


@torch.no_grad()
def _before_decoder(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    given, cache = _given(module, args, kwargs)
    if cache is None:
        return None
    if not torch.compiler.is_compiling():  # whose layers decide alone, and whose graph may not care
        if given.get("attention_mask") is not None or cache.running.masked:
            _note_mask(cache, given)
        if not PACKED.isdisjoint(given):
            check_packed(given)
        if module.training:
            check_training(module, cache)
        if given.get("output_attentions"):
            _check_weights(cache)
        position_ids = given.get("position_ids")
        if position_ids is not None and position_ids.shape[-1] > 1:
            check_running(cache, given, position_ids)
    if cache.surprisals is None:
        cache.begin_forward()
    if cache.settings.policy.score.positions != "cache":
        return None
    return (), {**given, "position_ids": place(cache, given)}


def _check_weights(cache: KVCache) -> None:
    """Refuse to hand out attention weights, before the cache changes."""
    if cache.config._attn_implementation == IMPLEMENTATION:
        raise KvtoolError(
            "output_attentions is not available with a kvtool cache",
            hint="read the weights of a forward without one: they are those of the full cache",
        )


def _note_mask(cache: KVCache, given: dict[str, Any]) -> None:
    """Note what the mask of a forward says, and refuse what cannot be honoured."""
    mask, running = given.get("attention_mask"), cache.running
    own_mask = False if mask is None else read_mask(cache, given, mask)
    if (mask is not None) != running.masked or own_mask != running.own_mask:
        running.begin(masked=mask is not None, own_mask=own_mask)


def _given(module: nn.Module, args: tuple, kwargs: dict) -> tuple[dict[str, Any], KVCache | None]:
    """Return the arguments of a forward that begins, and its kvtool cache if it has one."""
    forget_pending()
    given = _named(module, args, kwargs) if args else kwargs
    cache = given.get("past_key_values")
    if not isinstance(cache, KVCache):
        return given, None
    if given.get("use_cache") is False:
        raise _unused()
    if cache.settings.kv_sharing:
        forget_shared_kv()
    return given, cache


def _after_decoder(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
    given = _named(module, args, kwargs) if args else kwargs
    cache = given.get("past_key_values")
    if not isinstance(cache, KVCache):
        return
    if cache.settings.kv_sharing:
        forget_shared_kv()
    returned: object = getattr(output, "past_key_values", None)
    if returned is not cache:
        check_returned(module, cache, output)
    if cache.surprisals is None:
        if not cache.changing:
            raise set_aside(module)
        cache.end_forward(given.get("input_ids"))


@torch.no_grad()
def _after_model(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
    given = _named(module, args, kwargs) if args else kwargs
    cache = given.get("past_key_values")
    if not isinstance(cache, KVCache):
        return None
    returned: object = getattr(output, "past_key_values", None)
    if returned is not cache:
        check_returned(module, cache, output)
    layer, compiling = cache.slot_layers[0], torch.compiler.is_compiling()
    counted = not compiling and layer.seen_device is None and cache.repetition is None
    if counted and _LOCAL.begun == (id(cache), layer.seen):
        raise set_aside(module)
    if cache.surprisals is not None:
        answer_logits(cache, cache.surprisals, output)
        cache.end_forward(given.get("input_ids"))
        return output
    parts = cache.running.fed.parts
    if not parts or parts[-1][0] != cache.slot_layers[0].seen:  # its decoder was handed embeddings
        cache.end_forward(given.get("input_ids"))
    return None


def _named(module: nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
    """All arguments of a forward by name."""
    names = inspect.signature(module.forward).parameters
    return dict(zip(names, args, strict=False)) | kwargs


def _unused() -> UsageError:
    """The refusal of a cache that is not to be used.

    Transformers' `generate` then feeds the whole text at every step, and the cache takes it in
    again and again.
    """
    return UsageError(
        "use_cache=False says that no cache is used, and a kvtool cache is passed along",
        hint="pass use_cache=True, or no past_key_values "
        "(where nobody says, generation_config.use_cache counts)",
    )
