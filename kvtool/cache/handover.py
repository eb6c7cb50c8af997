"""How the attention and mask functions find the layer that they run for.

Transformers calls `Cache.update` and then the attention function, in the same forward and thread,
and tells the second nothing about the first. So `update` leaves a note for its thread, and the
attention function picks it up. The mask function is told in the same way by `get_mask_sizes`, which
runs right before it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from kvtool.errors import KvtoolError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvtool.cache.cache import KVCache
    from kvtool.cache.slots import SlotLayer

_LOCAL = threading.local()


@dataclass(frozen=True)
class Taken:
    """What `update` has taken in and nobody has attended yet.

    Attributes:
        raw_key, raw_value: what `update` returned: kept slots and new tokens.
        new_key, new_value: the new tokens alone.
    """

    cache: KVCache
    layer: SlotLayer
    raw_key: Tensor
    raw_value: Tensor
    new_key: Tensor
    new_value: Tensor
    decoding: bool


@dataclass
class Attachment:
    """What `attach` changed in a model, so that `detach` can undo it, and what was learned of it.

    Attributes:
        head_ranks: (attention layers, kv_heads) int64, once somebody has ranked the heads.
    """

    implementation: str
    hooks: list = field(default_factory=list)  # on eager attention modules
    logit_hooks: list = field(default_factory=list)  # on the model itself
    head_ranks: Tensor | None = None


def attachment(model: PreTrainedModel) -> Attachment | None:
    """What `attach` noted on this model, None if it is not attached."""
    return getattr(model, "_kvtool_attachment", None)


def give(taken: Taken) -> None:
    """Leave the note for the attention call that follows in this thread."""
    taken.layer.unattended = True
    _LOCAL.taken = taken


def pick_up(keys: int) -> Taken | None:
    """Take the note, if it is about that many keys; a note left by a failed forward is dropped."""
    taken: Taken | None = getattr(_LOCAL, "taken", None)
    _LOCAL.taken = None
    if taken is None or keys != taken.raw_key.shape[2]:
        return None
    taken.layer.unattended = False
    return taken


def check_attended(layer: SlotLayer) -> None:
    """Refuse to take in a block when the one before was never attended.

    Raises:
        KvtoolError: the model does not run kvtool's attention, so nothing would ever be stored.
    """
    if getattr(layer, "unattended", False):
        raise KvtoolError(
            "the model does not run kvtool's attention, so this cache cannot work",
            hint="call kvtool.attach(model) first",
        )


def announce(layer: SlotLayer, decoding: bool) -> None:
    """Tell the mask function of this thread which layer it is called for, and for what."""
    _LOCAL.mask = layer, decoding


def announced() -> tuple[SlotLayer | None, bool]:
    """The layer of the mask being made and whether a token is being decoded, told once."""
    note = getattr(_LOCAL, "mask", (None, False))
    _LOCAL.mask = None, False
    return note
