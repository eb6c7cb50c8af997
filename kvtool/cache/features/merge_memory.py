"""What merging remembers beside the slots, such as thresholds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import LayerSite, Part, tensor_bytes
from kvtool.policies.evicted.eviction import Merging
from kvtool.policies.numbers import State


class MergeMemory(Part):
    """Tensors of a policy that merges what it evicts; the first axis of each is the batch."""

    name = "memory"

    def __init__(self, merging: Merging) -> None:
        self.merging = merging
        self.state: State = {}

    @classmethod
    def make(cls, site: LayerSite) -> MergeMemory | None:
        merging = site.policy.on_evict
        return cls(merging) if isinstance(merging, Merging) else None

    def begin(self, batch: int, kv_heads: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.state = self.merging.start(batch, kv_heads, device)

    def clear(self) -> None:
        self.state = {}

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        self.state = {name: change(number) for name, number in self.state.items()}

    def works_on_keys(self, layer: SlotLayer) -> str:
        return f"`{self.merging.name}`"

    def stationary(self) -> list[Tensor]:
        return list(self.state.values())

    def tensors(self) -> dict[str, Tensor]:
        return {f"memory.{name}": number for name, number in self.state.items()}

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.state = {name: tensors[f"memory.{name}"] for name in self.state}

    @property
    def nbytes(self) -> int:
        return tensor_bytes(list(self.state.values()))
