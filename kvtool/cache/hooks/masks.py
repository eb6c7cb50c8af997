"""Masks of callers and models in train mode: what a kvtool cache can honour, and what it refuses.

kvtool's own masks are positions, int64 tensors that `kvtool_mask` has noted here. A mask that is
bool or float is the caller's, whatever its shape.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from kvtool.cache.whole.cache import KVCache
from kvtool.errors import KvtoolError

_LOCAL = threading.local()
PACKED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"})  # arguments of a forward


def note_own(mask: Tensor) -> Tensor:
    """Note that kvtool has made a mask, which a model may hand on to its decoder."""
    if not torch.compiler.is_compiling():
        _own()[id(mask)] = mask
    return mask


def _own() -> WeakValueDictionary[int, Tensor]:
    found: WeakValueDictionary[int, Tensor] | None = getattr(_LOCAL, "own", None)
    if found is None:
        found = _LOCAL.own = WeakValueDictionary()
    return found


def is_callers(mask: Tensor) -> bool:
    """Return whether a mask that comes to an attention function says what is seen."""
    return mask.dtype != torch.int64


def check_packed(given: Mapping[str, Any]) -> None:
    """Refuse several texts packed into one batch entry."""
    packed = [name for name in sorted(PACKED & given.keys()) if given[name] is not None]
    if packed:
        raise KvtoolError(
            f"`{packed[0]}` packs several texts into a row, which a kvtool cache would read as one",
            hint="pass them as rows of a padded batch",
        )


def read_mask(cache: KVCache, given: Mapping[str, Any], mask: object) -> bool:
    """Check the mask of a forward that begins.

    Returns:
        Whether it says of each query, or anew, which tokens it sees.
    """
    if isinstance(mask, Mapping):
        said = [read_mask(cache, given, one) for one in mask.values() if one is not None]
        return any(said)
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        shape = f" of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else ""
        raise KvtoolError(
            f"an attention mask that is a {type(mask).__name__}{shape} cannot be read",
            hint="pass (batch, tokens), or (batch, 1, new tokens, all tokens)",
        )
    if mask.dim() == 2:
        return _hides_read_tokens(cache, given, mask)
    if not is_callers(mask) and _own().get(id(mask)) is mask:
        return False
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise KvtoolError(
            f"a 4D attention mask is bool (True = seen) or float (added), not {mask.dtype}"
        )
    _check_policy(cache, "a 4D attention mask says which tokens each query sees")
    return True


def _check_policy(cache: KVCache, what: str) -> None:
    """Refuse a policy that could not do what a mask says."""
    if cache.policy.attends_all:
        return
    does = "reads a part of them" if cache.policy.stores_all else "evicts some"
    raise KvtoolError(
        f"{what}, and policy `{cache.policy}` {does}",
        hint="pass an attention mask of two dimensions that only grows, or take policy full, "
        "with or without a codec (full+int8)",
    )


def _hides_read_tokens(cache: KVCache, given: Mapping[str, Any], mask: Tensor) -> bool:
    """Return whether a mask says something else of the tokens read so far than before."""
    layer, running = cache.first_layer, cache.running
    if layer.seen_device is not None:
        return False
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    width = 0 if tokens is None else tokens.shape[1]
    seen = layer.seen
    if mask.shape[1] < seen + width:
        raise KvtoolError(
            f"the attention mask has {mask.shape[1]} columns, and the cache has read {seen} tokens "
            f"before these {width}",
            hint="a mask covers all tokens, those in the cache included",
        )
    if seen == 0 or running.in_prompt:
        return False
    if width == 1 and running.in_generate:
        return running.own_mask  # generate adds a column of ones to its mask
    device = layer.slots.device
    if layer.lengths is None:
        same = mask[:, : seen + (width == 1)].to(device).bool().all()
    else:
        shown = mask[:, :seen].to(device).bool().sum(1)
        same = shown == layer.lengths
        if not cache.policy.attends_all:  # a mask of ones leaves out what was padding, as before
            same = same | (shown == seen)
        same = same.all()
    if bool(same):
        return False
    _check_policy(cache, "the attention mask hides or shows other tokens of the text than before")
    return True


# ---- models in train mode

_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")  # in configurations


def check_training(module: nn.Module, cache: KVCache) -> None:
    """Refuse a decoder in train mode that would drop the cache, or attention weights."""
    if any(getattr(each, "gradient_checkpointing", False) for each in module.modules()):
        raise KvtoolError(
            "gradient checkpointing runs layers without their cache, so a kvtool cache would stay "
            "empty",
            hint="call model.eval(), or model.gradient_checkpointing_disable()",
        )
    if any(getattr(cache.config, name, None) for name in _DROPOUT):
        raise dropout_refused()


def dropout_refused() -> KvtoolError:
    """Return the refusal of attention dropout."""
    return KvtoolError(
        "the model is in train mode with attention dropout, which a kvtool cache has no part in",
        hint="call model.eval()",
    )
