"""How the attention and mask functions find the layer that they run for.

Transformers calls `Cache.update` and then the attention function, in the same forward and thread,
and tells the second nothing about the first. So `update` leaves a note for its thread, and the
attention function picks it up. The mask function is told in the same way by `get_mask_sizes`, which
runs right before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from kvtool.errors import KvtoolError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel

    from kvtool.cache.cache import KVCache
    from kvtool.cache.rotary import Rotation
    from kvtool.cache.slots import SlotLayer
    from kvtool.policies.numbers import Count

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


@dataclass(frozen=True)
class Fed:
    """Where the model has placed the new tokens of a forward.

    Attributes:
        seen: tokens that the cache had seen before, padding included; None in a static step.
        start: position id of the first one, of all rows or (rows,); the next ones follow, padding
            left out.
        end: no position id of theirs, nor of a token before, is as large as this.
    """

    seen: int | None
    start: Count
    end: int

    def follows(self, layer: SlotLayer) -> bool:
        """Whether the forward is the one that comes next to a layer."""
        return layer.clock is not None or self.seen == layer.seen

    def behind(self, tokens: int) -> Fed:
        """The same for the new tokens without the first ones."""
        return replace(self, start=self.start + tokens)

    def of(self, choose: Callable[[Tensor], Tensor]) -> Fed:
        """The same for other rows, which `choose` brings about."""
        return replace(self, start=choose(self.start)) if isinstance(self.start, Tensor) else self


@dataclass
class Attachment:
    """What `attach` changed in a model, so that `detach` can undo it, and what was learned of it.

    Attributes:
        eager: whether the model's own eager attention runs, watched by hooks.
        head_ranks: (attention layers, kv_heads) int64, once somebody has ranked the heads.
        rotations: how each attention layer turns its keys, by the model's device and dtype, once
            somebody has asked.
        recurrent: states of each layer's recurrence by name, of one row, likewise.
    """

    implementation: str
    hooks: list[RemovableHandle] = field(default_factory=list)
    eager: bool = False
    head_ranks: Tensor | None = None
    rotations: dict[tuple, list[Rotation | None]] = field(default_factory=dict)
    recurrent: dict[tuple, list[Mapping[str, Tensor]]] = field(default_factory=dict)


def attachment(model: PreTrainedModel) -> Attachment | None:
    """What `attach` noted on this model, None if it is not attached."""
    return getattr(model, "_kvtool_attachment", None)


def give(taken: Taken) -> None:
    """Leave the note for the attention call that follows in this thread."""
    taken.layer.unattended = True
    _LOCAL.taken = taken


def forget() -> None:
    """Drop a note that a broken-off forward has left in this thread."""
    _LOCAL.taken = None


def pick_up(keys: int) -> Taken | None:
    """Take the note, if it is about that many keys."""
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
    if layer.unattended:
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
