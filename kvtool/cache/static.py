"""Steps that change nothing but the contents of tensors, so that one graph serves them all.

A compiled graph holds for the numbers on the host that it has read, and a CUDA graph for the
addresses, too. In a static step the count of tokens is therefore a number on the device, which the
host has counted up before, and what else a step would replace is written into buffers in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvtool.cache.slots import SlotLayer

_REPLACED = ("pending", "next", "lengths")  # tensors that a step outside replaces by new ones


class StaticSteps:
    """The buffers and clocks of a cache whose shapes are fixed."""

    def __init__(self) -> None:
        self._fixed: list[_Fixed] = []
        self._clocks: dict[torch.device, Tensor] = {}

    @contextmanager
    def step(self, layers: list[SlotLayer]) -> Iterator[None]:
        """Count one token in every layer; inside, the layers go by their clocks.

        What is raised before the step has begun leaves the cache as it was.
        """
        counting = [each for layer in layers for each in _counting(layer)]
        if [fixed.store for fixed in self._fixed] != counting:
            self._fixed = [_Fixed(each) for each in counting]
        for fixed in self._fixed:
            fixed.adopt()
        seen = layers[0].seen
        try:
            for each in counting:
                each.seen, each.clock = seen + 1, self._clock(each.device)
            for clock in self._clocks.values():
                clock.fill_(seen + 1)
            yield
        except BaseException:
            for each in counting:
                each.seen = seen
            raise
        finally:
            for each in counting:
                each.clock = None
                each.leave_room()

    def forget(self) -> None:
        """Let go of the layers, whose tensors are about to be replaced and would be held here."""
        self._fixed = []

    def _clock(self, device: torch.device) -> Tensor:
        if device not in self._clocks:
            with torch.inference_mode(False):
                clock = torch.zeros(1, 1, 1, dtype=torch.int64, device=device)
            _keep_in_place([clock])
            self._clocks[device] = clock
        return self._clocks[device]


class _Fixed:
    """One layer or store of lanes, and the buffers for what its steps would replace."""

    def __init__(self, store: SlotLayer) -> None:
        self.store = store
        self._held: tuple[Tensor | None, ...] = ()

    def adopt(self) -> None:
        """Move what the last step outside has left into the buffers."""
        store = self.store
        if store.pending is not None:
            store.own()
        now = _held(store)
        if len(now) == len(self._held) and all(map(_same, now, self._held)):
            return
        for name, buffer in zip(_REPLACED, self._held or [None] * len(_REPLACED), strict=False):
            value = getattr(store, name)
            if value is None or value is buffer:
                continue
            with torch.inference_mode(False):
                if buffer is None or buffer.shape != value.shape:
                    buffer = torch.empty_like(value)
                setattr(store, name, buffer.copy_(value))
        self._held = _held(store)
        _keep_in_place(stationary(store))


def _held(store: SlotLayer) -> tuple[Tensor | None, ...]:
    """What tells whether a tensor of a layer has been replaced: others are replaced with these."""
    return store.pending, store.next, store.lengths, store.keys, store.positions


def _same(one: object, other: object) -> bool:
    return one is other


def _counting(layer: SlotLayer) -> list[SlotLayer]:
    return [layer] if layer.lanes is None else [layer, *layer.lanes.stores]


def stationary(store: SlotLayer) -> list[Tensor]:
    """The tensors of a layer that a static step reads or writes, where they are."""
    own = [store.keys, store.values, store.positions, *store.state.values()]
    replaced = (getattr(store, name) for name in _REPLACED)
    return [*own, *store.memory.values(), *(tensor for tensor in replaced if tensor is not None)]


def _keep_in_place(tensors: list[Tensor]) -> None:
    """Tell CUDA graphs that they need no copies of these."""
    for tensor in tensors:
        if tensor.is_cuda:
            torch._dynamo.mark_static_address(tensor)
