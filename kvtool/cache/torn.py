"""Refuse a cache whose last forward did not end: some of its layers have seen it, others have not.

The cache notes when a forward begins to change it (`changing`); what is here takes the note back
when the forward has ended, and looks at it before the next one.
"""

from __future__ import annotations

import inspect
from functools import partial

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvtool.cache import handover
from kvtool.cache.cache import KVCache


def install(model: PreTrainedModel) -> list[RemovableHandle]:
    """Watch where forwards begin: call it before any hook that changes a cache.

    Returns:
        Handles whose `remove` undoes it.
    """
    return [
        module.register_forward_pre_hook(partial(_begin, whole), with_kwargs=True)
        for module, whole in ((model, True), (model.get_decoder(), False))
    ]


def install_end(model: PreTrainedModel) -> list[RemovableHandle]:
    """Watch where forwards end: call it after the others.

    Returns:
        Handles whose `remove` undoes it.
    """
    return [
        module.register_forward_hook(partial(_end, whole), with_kwargs=True)
        for module, whole in ((model, True), (model.get_decoder(), False))
    ]


def _begin(whole: bool, module: nn.Module, args: tuple, kwargs: dict) -> None:
    handover.forget()
    cache = _cache_of(whole, module, args, kwargs)
    if cache is not None:
        cache.check_whole()
        cache.changing = cache.recurrent


def _end(whole: bool, module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
    cache = _cache_of(whole, module, args, kwargs)
    if cache is not None:
        cache.changing = False


def _cache_of(whole: bool, module: nn.Module, args: tuple, kwargs: dict) -> KVCache | None:
    """The cache of a forward that goes as far as its policy looks.

    Args:
        whole: whether it is the model's and not its decoder's, which ends before the logits.
    """
    if args:
        names = inspect.signature(module.forward).parameters
        kwargs = dict(zip(names, args, strict=False)) | kwargs
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, KVCache) or whole != (cache.surprisals is not None):
        return None
    return cache
