"""Column sums of a prompt's attention that several caches want: those of a kind are made once."""

from __future__ import annotations

from torch import Tensor

from kvtool.cache.steps.block import Block, deferred
from kvtool.cache.storage.layer import SlotLayer


class KnownColumns:
    """What caches that take in one step of a model have summed of its attention.

    Policies whose numbers are of the same names have the same numbers, whatever their budgets and
    whatever weighs or replaces their scores later.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, ...], bool], tuple[list[Tensor], Tensor | None]] = {}

    def give(self, layer: SlotLayer, block: Block) -> bool:
        """Add to a block's numbers what is known of them; False: nobody has summed those yet."""
        kind, waiting = _kind(layer), deferred(layer)
        if kind not in self._known:
            return False
        sums, by_head = self._known[kind]
        for name, total in zip(layer.policy.columns, sums, strict=True):
            block.state[name] += total
        if waiting is not None and by_head is not None:
            waiting.add(by_head.clone(), block.view.block)
        return True

    def note(self, layer: SlotLayer, block: Block) -> None:
        """Keep what a block of a whole prompt has just been given, for the caches to come."""
        waiting = deferred(layer)
        sums = [block.state[name].clone() for name in layer.policy.columns]
        self._known[_kind(layer)] = sums, None if waiting is None else waiting.sums


def _kind(layer: SlotLayer) -> tuple[tuple[str, ...], bool]:
    """Return the names that are summed, and whether sums per query head are wanted beside them."""
    return layer.policy.columns, deferred(layer) is not None
