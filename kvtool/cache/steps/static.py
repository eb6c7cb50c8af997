"""Steps that change nothing but the contents of tensors, so that one graph serves them all.

A compiled graph holds for the numbers on the host that it has read, a CUDA graph for addresses. So
the count of tokens is a number on the device, and what a step would replace is written in place.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from kvtool.cache.slots.counts import Addresses
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import CutSchedule


def may_grow(layer: SlotLayer) -> bool:
    """Whether the shapes of a layer still change, or the host has a hand in its steps."""
    if not all(part.allows_static(layer) for part in layer.parts.at["allows_static"]):
        return True
    return any(
        store.grows if CutSchedule.of(store) is None else _may_be_cut(store)
        for store in layer.stores
    )


def _may_be_cut(store: SlotLayer) -> bool:
    """Whether the next token may have heads cut that are cut every few tokens, or has no slot."""
    schedule, slots = CutSchedule.of(store), store.slots
    if schedule is None or store.parts.at["place"]:  # by the slots in use
        return True
    left, full = schedule.left(store.seen), slots.kept >= store.budget.max_budget
    return left <= 1 or not full or slots.kept + left > store.budget.max_budget + schedule.spare


def reserve_slots(layer: SlotLayer, tokens: int) -> None:
    """Take slots for coming tokens at once, in a layer that appends them, for good or until a cut.

    Args:
        tokens: how many are to come, where the layer expects none.
    """
    wanted = layer.expected or tokens
    for store in layer.stores:
        slots, schedule = store.slots, CutSchedule.of(store)
        if slots.reserved is not None:
            continue
        if schedule is not None:
            slots.reserve(store.budget.max_budget + schedule.spare - slots.used)
        elif layer.appends:
            slots.reserve(wanted)


class StaticSteps:
    """The layers of a cache whose shapes are fixed, and their counts on the device.

    Attributes:
        epoch: is counted up whenever a step finds tensors in other places, or other shapes, than
            the step before: what was recorded then no longer holds.
    """

    def __init__(self) -> None:
        self._layers: list[SlotLayer] = []
        self._addresses: list[Addresses] = []
        self._fixed: list[list[Tensor]] = []
        self._used: list[int] = []
        self._seen: dict[torch.device, Tensor] = {}
        self.epoch = 0
        self._shared: dict[Any, Any] = {}  # by parts that attend

    @contextmanager
    def step(self, layers: list[SlotLayer]) -> Iterator[None]:
        """Count one token in every layer; inside, the layers use the device's count.

        What is raised before the step has begun leaves the cache as it was.
        """
        counting = [each for layer in layers for each in _counting(layer)]
        if counting != self._layers:
            self.forget()
            self._layers, self._fixed = counting, [[] for _ in counting]
            self._addresses = [Addresses() for _ in counting]
        with ExitStack() as ends:
            for each in counting:
                if each.parts.attends is not None:
                    ends.enter_context(each.parts.attends.static_step(each, self._shared))
            self._fix(counting)
            seen, ran = layers[0].seen, False
            try:
                for each in counting:
                    each.begin_static(self._seen_on(each.slots.device))
                for number in self._seen.values():
                    number.fill_(seen + 1)
                yield
                ran = True
            finally:
                for each in counting:
                    each.end_static(ran=ran)
                    if ran and each.slots.reserved is not None:
                        each.slots.use_reserved()

    def forget(self) -> None:
        """Let go of the layers, whose tensors are about to be replaced and would be held here."""
        self._layers, self._addresses, self._fixed, self._used = [], [], [], []
        self._shared = {}
        self.epoch += 1

    def _fix(self, layers: list[SlotLayer]) -> None:
        """Move what the last step outside has left to where static steps look for it."""
        now = []
        for layer, addresses in zip(layers, self._addresses, strict=True):
            layer.slots.fix(addresses)
            layer.fix_counts(addresses)
            now.append(stationary(layer))
        used = [layer.slots.used for layer in layers]
        same = used == self._used and all(map(_same, now, self._fixed))
        if not same:
            _keep_in_place(itertools.chain.from_iterable(now))
            self._fixed, self._used = now, used
            self.epoch += 1

    def _seen_on(self, device: torch.device) -> Tensor:
        if device not in self._seen:
            with torch.inference_mode(False):
                number = torch.zeros(1, 1, 1, dtype=torch.int64, device=device)
            _keep_in_place([number])
            self._seen[device] = number
        return self._seen[device]


def _same(now: list[Tensor], before: list[Tensor]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _counting(layer: SlotLayer) -> list[SlotLayer]:
    return [layer] if layer.ragged is None else [layer, *layer.ragged.buckets]


def stationary(layer: SlotLayer) -> list[Tensor]:
    """The tensors of a layer that a static step reads or writes, where they are."""
    own = [*layer.slots.tensors()]
    for part in layer.parts.at["stationary"]:
        own += part.stationary()
    return own if layer.lengths is None else [*own, layer.lengths]


def _keep_in_place(tensors: Iterable[Tensor]) -> None:
    """Mark tensors of which CUDA graphs need no copies."""
    for tensor in tensors:
        if tensor.is_cuda:
            torch._dynamo.mark_static_address(tensor)
