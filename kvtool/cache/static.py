"""Steps that change nothing but the contents of tensors, so that one graph serves them all.

A compiled graph holds for the numbers on the host that it has read, and a CUDA graph for the
addresses, too. In a static step the count of tokens is therefore a number on the device, which the
host has counted up before, and what else a step would replace is written into buffers in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor

from kvtool.cache.slots import SlotLayer

_REPLACED = ("pending", "next", "lengths")  # tensors that a step outside replaces by new ones


class StaticSteps:
    """The buffers and clocks of a cache whose shapes are fixed."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, int, str], Tensor] = {}
        self._clocks: dict[torch.device, Tensor] = {}

    @contextmanager
    def step(self, layers: list[SlotLayer]) -> Iterator[None]:
        """Count one token in every layer; inside, the layers go by their clocks.

        What is raised before the step has begun leaves the cache as it was.
        """
        counting = [(layer, *layer.lanes.stores) if layer.lanes else (layer,) for layer in layers]
        for i, counters in enumerate(counting):
            for j, each in enumerate(counters):
                self._adopt((i, j), each)
                each.seen += 1
                each.clock = self._clock(each)
        for clock in self._clocks.values():
            clock.fill_(layers[0].seen)
        try:
            yield
        except BaseException:
            for each in chain(*counting):
                each.seen -= 1
            raise
        finally:
            for each in chain(*counting):
                each.clock = None

    def clocks(self) -> list[Tensor]:
        """The counts of tokens on the devices."""
        return list(self._clocks.values())

    def _adopt(self, place: tuple[int, int], store: SlotLayer) -> None:
        """Move what the last step outside has left into the buffers."""
        if store.pending is not None:
            store.own()
        for name in _REPLACED:
            value = getattr(store, name)
            if value is None:
                continue
            buffer = self._buffers.get((*place, name))
            if buffer is value:
                continue
            with torch.inference_mode(False):
                if buffer is None or buffer.shape != value.shape:
                    buffer = self._buffers[(*place, name)] = torch.empty_like(value)
                buffer.copy_(value)
            setattr(store, name, buffer)
        if store.device.type == "cuda":
            for tensor in stationary(store):
                torch._dynamo.mark_static_address(tensor)

    def _clock(self, store: SlotLayer) -> Tensor:
        if store.device not in self._clocks:
            with torch.inference_mode(False):
                clock = torch.zeros(1, 1, 1, dtype=torch.int64, device=store.device)
            if store.device.type == "cuda":
                torch._dynamo.mark_static_address(clock)
            self._clocks[store.device] = clock
        return self._clocks[store.device]


def stationary(store: SlotLayer) -> list[Tensor]:
    """The tensors of a layer that a static step reads or writes, where they are."""
    own = [store.keys, store.values, store.positions, *store.state.values()]
    replaced = (getattr(store, name) for name in _REPLACED)
    return [*own, *store.memory.values(), *(tensor for tensor in replaced if tensor is not None)]
