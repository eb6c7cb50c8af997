"""A layer with attention and a recurrence side by side; the attention half is compressed."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from kvtool.cache.storage.layer import SlotLayer
from kvtool.cache.storage.meter import ByteMeter
from kvtool.cache.storage.part import Part
from kvtool.policies.policy import Policy


class HybridSlotLayer(LinearAttentionLayer, SlotLayer):
    """A slot layer that is transformers' layer of a recurrence, too."""

    is_compileable = False
    is_croppable = False

    def __init__(
        self,
        index: int,
        policy: Policy,
        window: int | None,
        parts: Iterable[Part],
        meter: ByteMeter,
        number_of_states: int = 1,
        *,
        shown: bool = False,
    ) -> None:
        SlotLayer.__init__(self, index, policy, window, parts, meter, shown=shown)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args, **kwargs) -> None:
        if len(args) == 2:
            SlotLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        SlotLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        SlotLayer.reorder_cache(self, beam_idx)

    def why_no_crop(self, tokens: int) -> str | None:
        return "its recurrence does not go back"

    def crop(self, tokens_to_remove: int) -> None:
        SlotLayer.crop(self, tokens_to_remove)

    def get_max_length(self) -> int:
        return -1
