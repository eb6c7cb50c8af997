"""The hidden states that enter a layer's attention, for a policy that makes numbers of them.

They are held while the layer's step runs, and no longer. What a score makes of them are statistics
beside the slots, which follow the tokens like all others.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvtool.cache.slots.buffers import SlotBuffers
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import Lanes, LayerSite, Part
from kvtool.cache.slots.ragged import RaggedBuffers
from kvtool.cache.steps.block import Block
from kvtool.cache.steps.call import Call
from kvtool.errors import KvtoolError
from kvtool.policies.guard import fault
from kvtool.policies.numbers import State


class HiddenStates(Part):
    """The hidden states of the running forward, held until the layer's step has used them."""

    name = "of_hidden"
    joins_decode = False
    refusals: Mapping[str, str] = {
        "eager": "policy `{policy}` looks at hidden states, "
        "and the eager attention of `{model}` does not show them",
    }

    def __init__(self, hooks: object) -> None:
        self._hooks = hooks  # which go with the last cache that has them
        self.clear()

    @classmethod
    def make(cls, site: LayerSite) -> HiddenStates | None:
        if site.policy.sees_hidden:
            return HiddenNumbers(site.hooks)
        return RepeatedStates(site.hooks) if site.policy.repeats_by_output else None

    def clear(self) -> None:
        self._hidden: Tensor | None = None

    def note_hidden(self, hidden: Tensor, stored: bool) -> None:
        self._hidden = hidden.detach()

    def take(self, count: int) -> Tensor:
        """Return the hidden states of the next tokens, and let go of them.

        Raises:
            KvtoolError: no forward of an attached model has brought them.
        """
        hidden = self._hidden
        if hidden is None:
            raise KvtoolError(
                "the model has shown no hidden states to this cache",
                hint="attach it, build the cache anew and feed it by the model's own forward",
            )
        self._hidden = hidden[:, count:] if hidden.shape[1] > count else None
        return hidden[:, :count]

    def reorder(self, order: Tensor) -> None:
        """Bring the tokens of a forward into another order, (batch, q_len)."""
        if self._hidden is not None:
            self._hidden = self._hidden.gather(1, order[..., None].expand_as(self._hidden))


class RepeatedStates(HiddenStates):
    """Those of tokens that repeat a prompt, and of no others."""

    def note_hidden(self, hidden: Tensor, stored: bool) -> None:
        if not stored:
            super().note_hidden(hidden, stored)


class HiddenNumbers(HiddenStates):
    """Those of all tokens, of which a score makes numbers beside the slots."""

    joins_decode = True

    @torch.no_grad()
    def note_queries(self, layer: SlotLayer, call: Call, block: Block) -> None:
        """Write the numbers of a block's tokens beside them."""
        padding = (block.new < 0)[:, None] if layer.padded else None
        for name, numbers in self._numbers(layer, call.q_len).items():
            if padding is not None:
                numbers = numbers.masked_fill(padding, 0)
            block.state[name][:, :, block.kept :] = numbers

    @torch.no_grad()
    def note_token(self, layer: SlotLayer, call: Call) -> None:
        """Write the numbers of a decoded token beside it."""
        numbers, ragged = self._numbers(layer, 1), layer.ragged
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

    def _numbers(self, layer: SlotLayer, count: int) -> State:
        """Ask the score for numbers: (batch, kv_heads, count) of the heads held here, by name."""
        score, slots = layer.policy.ranking, layer.slots
        heads, held = slots.heads, slots.kv_heads
        found = {}
        for name, numbers in score.from_hidden(self.take(count), layer.index).items():
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


class LaneNumbers(Part):
    """The numbers of a decoded token, for heads that are stored apart."""

    name = "lane_numbers"

    def __init__(self) -> None:
        self._coming: State = {}

    def bring(self, numbers: State) -> None:
        """Take the numbers of the token that is about to be written, (lanes, 1, 1)."""
        self._coming = numbers

    def place_token(self, layer: SlotLayer, call: Call) -> Call:
        write(layer.slots, self._coming)
        self._coming = {}
        return call


def write(slots: SlotBuffers, numbers: State) -> None:
    """Write numbers, (batch, kv_heads, 1), beside the newest token, in place."""
    for name, number in numbers.items():
        if slots.written is None:
            slots.state[name].narrow(2, slots.used - 1, 1).copy_(number)
        else:
            slots.state[name].scatter_(2, slots.written, number)
