"""Decide for all layers at once: in steady state they differ in content only, so they are stacked.

A policy's arithmetic on one layer is small, and its cost is that of starting operations, layer
after layer. Here the positions and statistics of equal layers are rows of common tensors, each
layer leaves its attention weights, and the last layer of a step runs the policy once for all. Keys
and values stay where they are.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from kvtool.cache.departure import close_rank, part_decoded
from kvtool.cache.slots import SlotLayer
from kvtool.maths.selection import lowest
from kvtool.policies.attention_rows import AttentionRows
from kvtool.policies.parts import SlotView


class Group:
    """Layers in the same steady state, in the order in which a forward runs them."""

    def __init__(self, layers: list[SlotLayer]) -> None:
        self.layers = layers
        first = layers[0]
        self._batch = first.positions.shape[0]
        with torch.inference_mode(False):  # what is made inside it could not be written outside
            self._positions = torch.cat([layer.positions for layer in layers])
            self._state = {
                name: torch.cat([layer.state[name] for layer in layers]) for name in first.state
            }
        index = torch.tensor([layer.index for layer in layers], device=first.device)
        self._index = index.repeat_interleave(self._batch)[:, None, None]
        for i, layer in enumerate(layers):
            rows = slice(i * self._batch, (i + 1) * self._batch)
            layer.positions = self._positions[rows]
            layer.state = {name: number[rows] for name, number in self._state.items()}
            layer.group = self
        self._values: list[Tensor] = []
        self._rows: list[AttentionRows | None] = []
        self._make_room(torch.cat([layer.pending for layer in layers]))

    def dissolve(self) -> None:
        """Let the layers decide alone again, on numbers of their own."""
        for layer in self.layers:
            layer.group = None
            with torch.inference_mode(False):
                layer.positions = layer.positions.clone()
                layer.state = {name: number.clone() for name, number in layer.state.items()}

    def arrive(
        self, layer: SlotLayer, values: Tensor, rows: AttentionRows | None, observed: bool
    ) -> None:
        """Take a layer's evidence; at the last layer, choose every layer's next victims.

        Args:
            values: (batch, kv_heads, slots, value_dim) of the layer, by the heads that are cached.
            rows: the weights of the token being decoded, if the policy wants them.
            observed: whether the policy has yet to see them for its statistics.
        """
        if layer is self.layers[0]:
            self._values, self._rows = [], []
        self._values.append(values)
        self._rows.append(rows)
        if layer is self.layers[-1]:
            self._decide(observed)

    def _decide(self, observed: bool) -> None:
        first = self.layers[0]
        score, rescore = first.policy.ranking, first.policy.rescore
        rows = None
        if self._rows[0] is not None:
            rows = AttentionRows(torch.cat([rows.weights for rows in self._rows]))
        view = SlotView(
            values=tuple(self._values),
            positions=self._positions,
            tokens_seen=first.seen,
            budget=first.budget,
            held=first.used,
            layer=self._index,
            heads=first.heads,
        )
        if observed:
            first.policy.observe(self._state, view, rows)
        importance = score.importance(self._state, view, rows)
        if rescore is not None:
            importance = rescore.rescore(importance, view)
        protected = score.protected(self._state, view, 1)
        distinct = score.distinct and rescore is None
        victims = lowest(
            importance.expand_as(self._positions), self._positions, protected, distinct
        )
        for layer, victim in zip(self.layers, victims.split(self._batch), strict=True):
            layer.pending = victim
            part_decoded(layer, first.seen)
        close_rank(self._state, self._positions, victims)
        self._make_room(victims)
        self._values, self._rows = [], []

    def _make_room(self, victims: Tensor) -> None:
        """Clear what is beside the victims' slots and give them the position of the next token."""
        slot = victims[..., None]
        self._positions.scatter_(2, slot, self.layers[0].seen)
        for number in self._state.values():
            number.scatter_(2, slot, 0)


def form_groups(layers: list[SlotLayer]) -> bool:
    """Group the layers, if all of them that ever will are in their steady state.

    Returns:
        Whether they are.
    """
    steady = [layer for layer in layers if layer.cuts_itself]
    if any(layer.pending is None or layer.ragged for layer in steady):
        return False
    alike = defaultdict(list)
    for layer in steady:
        alike[layer.policy, layer.most, layer.positions.shape, layer.device].append(layer)
    for members in alike.values():
        if len(members) > 1:
            Group(members)
    return True
