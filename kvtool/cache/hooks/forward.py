"""Work of kvtool before and after every forward over one of its caches.

A forward is refused that does not use its cache. For a policy that scores by logits, all logits are
computed, the cache sees them, and the caller gets those that it asked for.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvtool.cache.hooks.masks import PACKED, check_packed, check_training, read_mask
from kvtool.cache.hooks.same_cache import check_returned, set_aside
from kvtool.cache.steps.attend import forget_shared_kv
from kvtool.cache.steps.call import IMPLEMENTATION, forget_pending
from kvtool.cache.whole.cache import KVCache
from kvtool.errors import KvtoolError, UsageError
from kvtool.transformers_versions import cache_argument

_KEEP = "logits_to_keep"


def ask_logits(cache: KVCache, given: dict[str, Any]) -> tuple[tuple, dict] | None:
    """Prepare a cache for a forward, and ask the forward for the logits of all tokens.

    Returns:
        The forward's arguments; None: as they are given.
    """
    if given.get("input_ids") is None:
        raise KvtoolError(
            f"policy `{cache.policy.score.name}` goes by token ids, "
            "and this forward has embeddings only"
        )
    cache.expect_logits(given["input_ids"], given.get("attention_mask"))
    if _KEEP not in given:
        return None
    cache.running.ask_logits(given[_KEEP])
    return (), {**given, _KEEP: 0}


def answer_logits(cache: KVCache, output: Any) -> None:
    """Show the logits to a cache, and leave those that the caller has asked for."""
    logits = getattr(output, "logits", None)
    if logits is None:
        raise KvtoolError(
            f"policy `{cache.policy.score.name}` goes by logits, and this forward returns none",
            hint="call the attached model itself, with return_dict=True",
        )
    cache.take_logits(logits)
    asked = cache.running.answer_logits()  # as transformers' `logits_to_keep` selects columns
    if not isinstance(asked, int):
        output.logits = logits[:, asked]
    elif asked:
        output.logits = logits[:, -asked:]


def check_running(cache: KVCache, given: dict[str, Any], position_ids: Tensor) -> None:
    """Refuse position ids that do not count a block's tokens on, for a policy that uses them."""
    layer, policy = cache.first_layer, cache.policy
    by_place = cache.settings.renumbers
    if not (by_place or policy.moments is not None) or position_ids.dim() != 2:
        return
    if cache.running.in_prompt or layer.seen_device is not None:
        return  # kvtool has counted them
    device, mask, q_len = position_ids.device, given.get("attention_mask"), position_ids.shape[1]
    start: Tensor | int = layer.seen
    if layer.lengths is not None:
        start = layer.lengths.to(device)[:, None]
    valid = torch.ones_like(position_ids, dtype=torch.bool)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        valid = mask[:, -q_len:].to(device).bool()
    wanted = start + valid.long().cumsum(1) - 1
    if not by_place:  # a shift of a whole text turns all alike
        wanted = wanted + (position_ids - wanted)[:, -1:]
    if bool(((position_ids != wanted) & valid).any()):
        raise KvtoolError(
            f"policy `{policy}` goes by the places of tokens in the text, "
            "and the position ids of this forward do not count them one by one",
            hint="leave out position_ids, or take a policy that needs no positions (h2o, snapkv)",
        )


_LOCAL = threading.local()  # of the running forward: what its cache had seen before


def install(model: PreTrainedModel) -> list[RemovableHandle]:
    """Hook a model, and its decoder, which may be called alone."""
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
    if not cache.parts.by_logits:
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
    if not cache.parts.by_logits:
        cache.begin_forward()
    if not cache.settings.renumbers:
        return None
    return (), {**given, "position_ids": cache.place_forward(given)}


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
    cache = given.get("cache")  # as `given_cache` finds it, without a call for each token
    if cache is None:
        cache = given.get("past_key_values")
    if not isinstance(cache, KVCache):
        return given, None
    if given.get("use_cache") is False:
        raise UsageError(  # transformers would feed the whole text at every step
            "use_cache=False says that no cache is used, and a kvtool cache is passed along",
            hint=f"pass use_cache=True, or no {cache_argument()} "
            "(where nobody says, generation_config.use_cache counts)",
        )
    if cache.settings.kv_sharing:
        forget_shared_kv()
    return given, cache


def _after_decoder(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
    given = _named(module, args, kwargs) if args else kwargs
    cache = given.get("cache")
    if cache is None:
        cache = given.get("past_key_values")
    if not isinstance(cache, KVCache):
        return
    if cache.settings.kv_sharing:
        forget_shared_kv()
    returned: object = getattr(output, "cache", None)
    if returned is not cache and getattr(output, "past_key_values", None) is not cache:
        check_returned(module, cache, output)
    if not cache.parts.by_logits:
        if not cache.changing:
            raise set_aside(module)
        cache.end_forward(given.get("input_ids"))


@torch.no_grad()
def _after_model(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
    given = _named(module, args, kwargs) if args else kwargs
    cache = given.get("cache")
    if cache is None:
        cache = given.get("past_key_values")
    if not isinstance(cache, KVCache):
        return None
    returned: object = getattr(output, "cache", None)
    if returned is not cache and getattr(output, "past_key_values", None) is not cache:
        check_returned(module, cache, output)
    layer, compiling = cache.slot_layers[0], torch.compiler.is_compiling()
    stored = cache.running.unstored is None
    counted = not compiling and layer.seen_device is None and stored
    if counted and _LOCAL.begun == (id(cache), layer.seen):
        raise set_aside(module)
    if cache.parts.by_logits:
        answer_logits(cache, output)
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
