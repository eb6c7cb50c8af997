"""Group the layers of a cache that decide together what they evict."""

from __future__ import annotations

from collections import defaultdict

from kvtool.cache.slots.cut_schedule import CutSchedule
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.steps.grouped import LayerGroup, PacedGroup, may_pace


class LayerGroups:
    """The groups of a cache's layers; none unless all layers are in their steady state.

    Attributes:
        formed: whether they are.
        by_layer: the group that a layer decides with, by the layer's index.
    """

    def __init__(self) -> None:
        self.formed = False
        self.by_layer: dict[int, LayerGroup] = {}

    def form(self, layers: list[SlotLayer], masked: bool) -> None:
        """Group the layers, if all of them that ever will are in their steady state.

        Layers that decide together do not look for padding in place of the coming token. Not for
        static steps, whose addresses stay.

        Args:
            masked: whether batch entries may have padding in the running forward.
        """
        if masked and layers[0].padded:
            self.ungroup()
            return
        if self.formed:
            return
        steady = [layer for layer in layers if layer.evicts_tokens]
        if not all(map(_is_steady, steady)):
            return
        alike = defaultdict(list)
        for layer in steady:
            slots, schedule = layer.slots, CutSchedule.of(layer)
            until = None if schedule is None else schedule.until
            budget, shape = layer.budget.max_budget, slots.positions.shape
            alike[layer.policy, budget, shape, slots.device, slots.used, until].append(layer)
        for members in alike.values():
            if len(members) > 1:
                paced = CutSchedule.of(members[0]) is not None
                group = PacedGroup(members) if paced else LayerGroup(members)
                self.by_layer |= {layer.index: group for layer in members}
        self.formed = True

    def ungroup(self) -> None:
        """Let every layer decide alone again: their slots are about to change."""
        for group in {id(group): group for group in self.by_layer.values()}.values():
            group.ungroup()
        self.formed, self.by_layer = False, {}


def _is_steady(layer: SlotLayer) -> bool:
    """Whether nothing but contents of slots changes with a token, or their count until a cut."""
    if layer.ragged is not None:
        return False
    if layer.padded and not all(part.joins_padded for part in layer.parts.values()):
        return False
    return layer.slots.reuse_slot is not None or may_pace(layer)
