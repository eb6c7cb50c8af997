"""What a layer attends to, for later layers of the same forward that read its keys and values.

They come to attention with the very tensors that the lending layer got from the cache, and take
nothing in. So what else attention needs to know of them is kept here until the forward has ended.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch import Tensor

from kvtool.cache.steps.block import Block
from kvtool.cache.steps.call import StepContext
from kvtool.cache.storage.form import Stored
from kvtool.cache.storage.layer import SlotLayer

_LOCAL = threading.local()


@dataclass(frozen=True)
class Lent:
    """Keys and values of a layer that others read.

    Attributes:
        layer: the one that lends them.
        key: (batch, kv_heads, kept + q_len, head_dim), as the lending layer attends them.
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


def lend(lent: Lent) -> None:
    """Keep what a layer attends to, until the forward of this thread has ended."""
    _all()[lent.layer.index] = lent


def find_lent(key: Tensor) -> Lent | None:
    """Return what was lent together with these keys, None where they are not lent."""
    return next((lent for lent in _all().values() if lent.key is key), None)


def any_lent() -> bool:
    """Say whether the running forward of this thread has lent anything."""
    return bool(_all())


def forget_lent() -> None:
    """Drop what the forward of this thread has lent."""
    _LOCAL.lent = {}


def _all() -> dict[int, Lent]:
    found: dict[int, Lent] | None = getattr(_LOCAL, "lent", None)
    if found is None:
        found = _LOCAL.lent = {}
    return found
