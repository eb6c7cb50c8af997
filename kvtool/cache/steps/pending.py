"""How the attention and mask functions find the layer that they run for.

Transformers calls `Cache.update` and then the attention function, in the same forward and thread,
and tells the second nothing about the first. So `update` leaves a pending step in its thread, and
the attention function takes it. The mask function finds its layer in the same way, set by
`get_mask_sizes`, which runs right before it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from kvtool.cache.steps.call import Call, StepContext
from kvtool.cache.storage.layer import SlotLayer
from kvtool.errors import KvtoolError

IMPLEMENTATION = "kvtool"  # what attention and masks are called in transformers' registries

_LOCAL = threading.local()


class StepOwner(Protocol):
    """The cache, as far as a step needs it."""

    def begin_block(
        self, layer: SlotLayer, query_heads: int, positions: Tensor | None, q_len: int
    ) -> None:
        """Fix what a layer may keep, before a block is attended."""

    def end_step(self, step: PendingStep, call: Call, out: Tensor) -> None:
        """Note that a layer's step has run."""


@dataclass(frozen=True)
class PendingStep:
    """What `update` has taken in and nobody has attended yet.

    Attributes:
        owner: the cache of the layer.
        raw_key, raw_value: what `update` returned: kept slots and new tokens.
        new_key, new_value: the new tokens alone.
        decoding: whether they are one decoded token.
    """

    owner: StepOwner
    layer: SlotLayer
    raw_key: Tensor
    raw_value: Tensor
    new_key: Tensor
    new_value: Tensor
    decoding: bool
    context: StepContext


class MaskTarget(NamedTuple):
    """The layer that a mask is made for.

    Attributes:
        decoding: whether a token is being decoded.
        anew: whether the caller's mask hides or shows tokens that were read before.
    """

    layer: SlotLayer
    decoding: bool
    anew: bool = False


def set_pending(step: PendingStep) -> None:
    """Leave a step for the attention call that follows in this thread."""
    _LOCAL.step = step


def forget_pending() -> None:
    """Drop a step that a broken-off forward has left in this thread."""
    _LOCAL.step = None


def take_pending(keys: int) -> PendingStep | None:
    """Take the pending step, if it is about that many keys."""
    step: PendingStep | None = getattr(_LOCAL, "step", None)
    _LOCAL.step = None
    return None if step is None or keys != step.raw_key.shape[2] else step


def check_attended(layer: SlotLayer) -> None:
    """Refuse to take in a block when the one before was never attended.

    Raises:
        KvtoolError: the model does not run kvtool's attention, so nothing would ever be stored.
    """
    if layer.unattended:
        raise KvtoolError(
            "the model does not run kvtool's attention, so this cache cannot work",
            hint="call kvtool.attach(model) first",
        )


def set_mask_target(target: MaskTarget) -> None:
    """Tell the mask function of this thread which layer it is called for, and for what."""
    _LOCAL.mask = target


def take_mask_target() -> MaskTarget | None:
    """Take the target of the mask being made; it is told once."""
    target: MaskTarget | None = getattr(_LOCAL, "mask", None)
    _LOCAL.mask = None
    return target
