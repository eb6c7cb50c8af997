"""Tokens that a layer attends to, for later layers of a forward that read its keys and values.

They come to attention with the very tensors that the owning layer got from the cache, and take
nothing in. So what else attention needs to know of them is kept here until the forward has ended.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch import Tensor

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.slot_form import Stored
from kvtool.cache.steps.block import Block
from kvtool.cache.steps.call import StepContext

_LOCAL = threading.local()


@dataclass(frozen=True)
class SharedKV:
    """Keys and values of a layer that others read.

    Attributes:
        layer: the one that owns them.
        key: (batch, kv_heads, kept + q_len, head_dim), as the owning layer attends them.
        context: what the forward is like for it.
        block: of a prompt; None: a token is decoded.
        visible: of a decoded token, as for `attention_weights`; None: all keys.
        stored: what the slots in use hold, where a decoded token attends to codes.
    """

    layer: SlotLayer
    key: Tensor
    context: StepContext
    block: Block | None = None
    visible: Tensor | None = None
    stored: Stored | None = None


def share_kv(shared: SharedKV) -> None:
    """Keep what a layer attends to, until the forward of this thread has ended."""
    _all()[shared.layer.index] = shared


def find_shared_kv(key: Tensor) -> SharedKV | None:
    """Return what is shared together with these keys, None where they are not shared."""
    return next((shared for shared in _all().values() if shared.key is key), None)


def any_shared_kv() -> bool:
    """Say whether the running forward of this thread shares anything."""
    return bool(_all())


def forget_shared_kv() -> None:
    """Drop what the forward of this thread has shared."""
    _LOCAL.shared = {}


def _all() -> dict[int, SharedKV]:
    found: dict[int, SharedKV] | None = getattr(_LOCAL, "shared", None)
    if found is None:
        found = _LOCAL.shared = {}
    return found
