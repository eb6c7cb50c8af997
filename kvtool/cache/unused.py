"""Refuse forwards that are given a cache and told not to use it.

Transformers' `generate` then feeds the whole text at every step, and the cache takes it in again
and again.
"""

from __future__ import annotations

import inspect

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvtool.cache.cache import KVCache
from kvtool.errors import UsageError


def install(model: PreTrainedModel) -> list[RemovableHandle]:
    """Look at the arguments of every forward, of the model or of its decoder alone.

    Returns:
        Handles whose `remove` undoes it.
    """
    modules = (model, model.get_decoder())
    return [module.register_forward_pre_hook(_check, with_kwargs=True) for module in modules]


def _check(module: nn.Module, args: tuple, kwargs: dict) -> None:
    if args:
        names = inspect.signature(module.forward).parameters
        kwargs = dict(zip(names, args, strict=False)) | kwargs
    if kwargs.get("use_cache") is False and isinstance(kwargs.get("past_key_values"), KVCache):
        raise UsageError(
            "use_cache=False says that no cache is used, and a kvtool cache is passed along",
            hint="pass use_cache=True, or no past_key_values "
            "(where nobody says, generation_config.use_cache counts)",
        )
