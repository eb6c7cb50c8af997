"""Memory of merging beside the slots, such as thresholds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvtool.cache.features.held_queries import HeldQueries
from kvtool.cache.features.trace import Trace
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import LayerSite, Part, tensor_bytes
from kvtool.cache.slots.slot_form import take_stored
from kvtool.policies.evicted.eviction import Eviction, Merging
from kvtool.policies.numbers import State
from kvtool.policies.parts import SlotView


class MergeMemory(Part):
    """Tensors of a policy that merges what it evicts; the first axis of each is the batch."""

    name = "memory"
    refusals: Mapping[str, str] = {
        "latents": "`{policy.on_evict.name}`",
        "shared": "changes or sets aside what is evicted",
    }

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

    def take_evicted(self, layer: SlotLayer, view: SlotView, eviction: Eviction) -> None:
        held = HeldQueries.of(layer)
        if held is not None:
            eviction = replace(eviction, queries=held.give(view))
        self._absorb(layer, eviction)

    def _absorb(self, layer: SlotLayer, eviction: Eviction) -> None:
        merged = self.merging.absorb(self.state, eviction)
        trace = layer.parts.get(Trace.name)
        if isinstance(trace, Trace):
            trace.note_merged(eviction.evicted_positions, merged)

    @torch.no_grad()
    def take_decoded(self, layers: Sequence[SlotLayer], positions: Tensor) -> None:
        each_layer = zip(layers, positions.split(layers[0].slots.batch), strict=True)
        for layer, leaving in each_layer:
            own = MergeMemory.of(layer)
            if own is not None:
                own._absorb(layer, _evicted_token(layer, leaving))

    def stationary(self) -> list[Tensor]:
        return list(self.state.values())

    def tensors(self) -> dict[str, Tensor]:
        return {f"memory.{name}": number for name, number in self.state.items()}

    def check(self, file: Any, prefix: str, shape: Any, dtype: torch.dtype) -> None:
        start = self.merging.start(file.batch, shape.kv_heads, torch.device("cpu"))
        for key, first in start.items():
            name = f"{prefix}memory.{key}"
            found = file.left.get(name)
            if found is not None and first.isnan().all():  # which stands for: none yet
                file.left[name] = found.nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf)
            file.take(name, tuple(first.shape), first.dtype)

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.state = {name: tensors[f"memory.{name}"] for name in self.state}

    @property
    def nbytes(self) -> int:
        return tensor_bytes(list(self.state.values()))


def _evicted_token(layer: SlotLayer, positions: Tensor) -> Eviction:
    """Lay out the token evicted for a decoded one, while its key and value are there."""
    slots = layer.slots
    assert slots.reuse_slot is not None, "nothing leaves"
    evicted = slots.reuse_slot[..., None]
    slots.copy_on_write()
    used, left = slots.used_slots(), evicted
    stored, state, kept = used.stored, used.state, slots.stored_positions()
    if slots.form.codec is not None:  # kept tokens do not change: dequantise evicted ones
        stored, left = take_stored(stored, evicted), torch.zeros_like(evicted)
        state, kept = {name: number.gather(2, evicted) for name, number in state.items()}, positions
    keys, values = slots.form.dequantise(stored)
    return Eviction(
        keys=keys,
        values=values,
        state=state,
        evicted=left,
        evicted_positions=positions,
        kept_keys=keys,
        kept_values=values,
        kept_state=state,
        kept_positions=kept,
        tokens_seen=layer.tokens_seen,
        layer=layer.index,
        heads=layer.slots.heads,
        whole=not layer.masked,
    )
