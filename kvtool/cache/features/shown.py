"""Hidden states, output projections and layers above, as they are shown to a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kvtool.cache.slots.buffers import SlotBuffers
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import Lanes, LayerSite, Part
from kvtool.cache.slots.ragged import RaggedBuffers
from kvtool.cache.steps.block import Block
from kvtool.cache.steps.call import Call
from kvtool.policies.evidence import OutputProjection
from kvtool.policies.guard import fault
from kvtool.policies.numbers import State
from kvtool.policies.parts import SlotView
from kvtool.policies.slot_view import Above


class HiddenNumbers(Part):
    """Makes statistics of hidden states; they follow the tokens like all others."""

    name = "of_hidden"
    refusals: Mapping[str, str] = {
        "eager": "policy `{policy}` looks at hidden states, "
        "and the eager attention of `{model}` does not show them",
    }

    @classmethod
    def make(cls, site: LayerSite) -> HiddenNumbers | None:
        return cls() if site.policy.sees_hidden else None

    @torch.no_grad()
    def take_block(self, layer: SlotLayer, call: Call, block: Block) -> Block:
        """Write the numbers of a block's tokens beside them."""
        padding = (block.new < 0)[:, None] if layer.padded else None
        for name, numbers in _numbers(layer, call).items():
            if padding is not None:
                numbers = numbers.masked_fill(padding, 0)
            block.state[name][:, :, block.kept :] = numbers
        return block

    @torch.no_grad()
    def note_token(self, layer: SlotLayer, call: Call) -> None:
        """Write the numbers of a decoded token beside it."""
        numbers, ragged = _numbers(layer, call), layer.ragged
        if not isinstance(ragged, RaggedBuffers):
            write(layer.slots, numbers)
            return
        start = 0
        picked = {name: ragged.pick(number)[:, None] for name, number in numbers.items()}
        for bucket in ragged.buckets:
            own = slice(start, start + bucket.batch_size)
            start = own.stop
            part = LaneNumbers.of(bucket)
            if part is not None:
                part.bring({name: number[own] for name, number in picked.items()})

    def for_heads(self, lanes: Lanes) -> LaneNumbers:
        return LaneNumbers()


class LaneNumbers(Part):
    """The numbers of a decoded token, for heads that are stored apart."""

    name = "lane_numbers"

    def __init__(self) -> None:
        self._coming: State = {}

    def bring(self, numbers: State) -> None:
        """Take the numbers of the token that is about to be counted, (lanes, 1, 1)."""
        self._coming = numbers

    def note_token(self, layer: SlotLayer, call: Call) -> None:
        write(layer.slots, self._coming)
        self._coming = {}


def _numbers(layer: SlotLayer, call: Call) -> State:
    """Ask the score for numbers: (batch, kv_heads, q_len) of the heads held here, by name."""
    score, slots = layer.policy.ranking, layer.slots
    heads, held = slots.heads, slots.kv_heads
    found = {}
    for name, numbers in score.from_hidden(call.context.shown_hidden(), layer.index).items():
        if numbers.shape[1] not in (1, held * heads.processes):
            raise fault(
                layer.policy.score,
                "from_hidden",
                f"returns numbers of {numbers.shape[1]} KV heads, "
                f"and layer {layer.index} has {held * heads.processes}",
            )
        own = numbers if numbers.shape[1] == 1 else heads.own(numbers)
        found[name] = own.expand(-1, held, -1)
    return found


def write(slots: SlotBuffers, numbers: State) -> None:
    """Write numbers, (batch, kv_heads, 1), beside the newest token, in place."""
    for name, number in numbers.items():
        if slots.written is None:
            slots.state[name].narrow(2, slots.used - 1, 1).copy_(number)
        else:
            slots.state[name].scatter_(2, slots.written, number)


class Projection(Part):
    """Where a layer finds the `weight` of its output projection, (hidden_size, heads * dim)."""

    name = "projection"
    joins_decode = False
    refusals: Mapping[str, str] = {
        "eager": "policy `{policy}` looks at what the output projection makes of values, "
        "and the eager attention of `{model}` does not show it",
        "latents": "policy `{policy}`",
    }

    def __init__(
        self, weight: Callable[[], Tensor] | None, heads: Tensor | None = None, kv_heads: int = 1
    ) -> None:
        self.weight, self._heads, self._kv_heads = weight, heads, kv_heads

    @classmethod
    def make(cls, site: LayerSite) -> Projection | None:
        return cls(site.projection) if site.policy.sees_projection else None

    def seen(self) -> OutputProjection:
        """Return it as a policy sees it."""
        assert self.weight is not None, "this cache was made for a model"
        return OutputProjection(self.weight(), self._heads, self._kv_heads)

    def for_heads(self, lanes: Lanes) -> Projection:
        return Projection(self.weight, lanes.heads, lanes.kv_heads)

    def show(self, layer: SlotLayer, view: SlotView) -> SlotView:
        return replace(view, projections=(*view.projections, self.seen()))


class Parents(Part):
    """The first layer of free budget and the one right above; none above the first."""

    name = "parents"
    joins_padded = False

    def __init__(self, first: SlotLayer | None = None, above: SlotLayer | None = None) -> None:
        self.first, self.above = first, above

    @classmethod
    def make(cls, site: LayerSite) -> Parents | None:
        if site.policy.score.layer_tokens != "nested":
            return None
        return cls(site.above[0], site.above[-1]) if site.above else cls()

    def show(self, layer: SlotLayer, view: SlotView) -> SlotView:
        if self.first is None:
            return view
        kept = self.kept(view.positions, layer.seen)
        return replace(view, above=Above(self.first.budget.tokens, kept))

    def kept(self, positions: Tensor, seen: int) -> Tensor | None:
        """Which slots hold tokens that the layer above keeps: bool (batch, 1, slots).

        Args:
            positions: (batch, kv_heads, slots), of `seen` tokens, padding included.
        """
        if self.above is None:
            return None
        kept = self.above.stored_positions()[:, 0].long().to(positions.device)
        count = seen + 1  # an empty slot, -1, counts as the last one
        known = torch.zeros(kept.shape[0], count, dtype=torch.bool, device=positions.device)
        known.scatter_(1, kept.remainder(count), True)[:, -1] = False
        return known.gather(1, positions[:, 0].long().remainder(count))[:, None]
