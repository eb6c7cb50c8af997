"""The surprisal of every kept token, one number for all layers, and the cuts that use it.

Layers of free budget hold the same tokens in the same slots, so one table serves them all. Before a
forward every layer is cut, so that the new tokens fit. After it the logits say how unexpected they
were; those of the last token stay until the next token is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.cache.features.cache_part import CachePart
from kvtool.cache.slots.buffers import Slots, ascending
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import tensor_bytes
from kvtool.cache.slots.slot_form import take_stored
from kvtool.cache.steps.view import make_view, with_empty_slots
from kvtool.errors import KvtoolError
from kvtool.maths.selection import keep_top, lowest
from kvtool.maths.statistics import surprisals
from kvtool.policies.numbers import Count, minimum
from kvtool.policies.parts import SlotView
from kvtool.policies.policy import Policy
from kvtool.policies.scores.sirllm import SirLLM


@dataclass(frozen=True)
class Arriving:
    """Tokens of the running forward.

    Attributes:
        tokens: (batch, q_len) int64.
        valid: (batch, q_len), False = padding; None: no padding.
        begun: (batch,) whether anything of the sequence was read before; None: the same for all
            sequences.
        slot: (batch, 1) that a decoded token takes; None where tokens are appended.
    """

    tokens: Tensor
    valid: Tensor | None
    begun: Tensor | None
    slot: Tensor | None = None

    @property
    def count(self) -> Count:
        """New tokens of each sequence."""
        return self.tokens.shape[1] if self.valid is None else self.valid.sum(1)[:, None, None]


def read_surprisals(new: Arriving, logits: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
    """Read from logits how unexpected new tokens were.

    Args:
        logits: (batch, q_len, vocab) of the forward.
        known: (batch, vocab) logits after the tokens before; None: there are none.

    Returns:
        The surprisal of each token, (batch, q_len) float32, and the logits after the last one.
    """
    tokens = new.tokens.to(logits.device)
    valid = None if new.valid is None else new.valid.to(logits.device)
    columns = torch.arange(tokens.shape[1], device=logits.device).expand_as(tokens)
    last = columns if valid is None else torch.where(valid, columns, -1).cummax(1).values
    before = functional.pad(last[:, :-1], (1, 0), value=-1)  # the token before, -1: none here
    if tokens.shape[1] == 1 and known is not None:
        scores = surprisals(known[:, None], tokens, columns)
    else:
        scores = surprisals(logits, tokens, before.clamp(min=0))
        highest = scores.masked_fill(before < 0, 0).amax(1, keepdim=True)
        opening = highest
        if known is not None:
            opening = surprisals(known[:, None], tokens, torch.zeros_like(tokens))
            if new.begun is not None:
                begun = new.begun[:, None].to(logits.device)
                opening = torch.where(begun, opening, highest)
        scores = torch.where(before < 0, opening, scores)
    return scores, _last(logits, valid, last, known)


def _last(logits: Tensor, valid: Tensor | None, last: Tensor, known: Tensor | None) -> Tensor:
    """Copy the logits after the last token of each row: (batch, vocab)."""
    if valid is None:
        return logits[:, -1].clone()
    rows = torch.arange(logits.shape[0], device=logits.device)
    found = logits[rows, last[:, -1].clamp(min=0)]
    if known is None:
        return found
    return torch.where((last[:, -1] >= 0)[:, None], found, known)


class Surprisals(CachePart):
    """What a policy that scores by the model's logits knows, and how it cuts all layers.

    Attributes:
        table: (batch, 1, capacity) float32, by slot; None while nothing is stored.
        next_logits: (batch, vocab) in the model's dtype, after the last token of each sequence.
        arriving: what the running forward reads, None between forwards.
    """

    name = "surprisals"
    by_logits = True
    refusals: ClassVar[Mapping[str, str]] = {
        "joined": "its cuts go by the logits of the tokens to come",
        "static": "the host cuts the cache before every step",
    }

    def __init__(self, layers: list[SlotLayer], score: SirLLM) -> None:
        self._layers, self._score = layers, score
        self.clear()

    @classmethod
    def serves(cls, policy: Policy) -> bool:
        return policy.score.layer_tokens == "same"

    @classmethod
    def make(cls, layers: list[SlotLayer], policy: Policy) -> Surprisals | None:
        free = [layer for layer in layers if layer.window is None]
        return cls(free, policy.score) if isinstance(policy.score, SirLLM) and free else None

    def check_tokens(self, decoding: bool) -> None:
        """Refuse tokens of a forward that will show no logits (KvtoolError)."""
        if self.arriving is None:
            raise KvtoolError(
                f"policy `{self._score.name}` goes by the logits of the model, "
                "and this forward runs a part of it only",
                hint="call kvtool.attach(model) and then the model itself",
            )

    def clear(self) -> None:
        self.table: Tensor | None = None
        self.next_logits: Tensor | None = None
        self.arriving: Arriving | None = None
        self._decay: float | Tensor = 1.0  # at the next cut of this turn, of each sequence

    def begin_prompt(self) -> None:
        """Let the surprisals of tokens kept before decay at the prompt's first cut."""
        self._decay = self._score.decay

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        self.table = None if self.table is None else change(self.table)
        self.next_logits = None if self.next_logits is None else change(self.next_logits)

    @property
    def nbytes(self) -> int:
        """Bytes of the table and of the logits that wait for the next token."""
        return tensor_bytes([t for t in (self.table, self.next_logits) if t is not None])

    # ---- before a forward

    def begin_forward(self, tokens: Tensor, valid: Tensor | None, decoding: bool) -> None:
        """Cut every layer so that the new tokens fit the budget."""
        first = self._layers[0]
        begun = None if first.lengths is None else first.lengths > 0
        slot: Tensor | None = None
        if decoding and first.slots.used >= first.budget.min_budget:
            slot = self._free_slot(valid)
        self.arriving = new = Arriving(tokens, valid, begun, slot)
        if not decoding and first.is_initialized and first.slots.used:
            self._make_room_for_block(new.count)

    def _free_slot(self, valid: Tensor | None) -> Tensor:
        """Choose the slot that a decoded token takes in every layer: (batch, 1)."""
        first = self._layers[0]
        count: Count = 1
        if first.padded:
            for layer in self._layers:
                layer.slots.fill_to(layer.budget.max_budget + 1)
            if valid is not None:
                count = valid.sum(1)[:, None, None]
        self._grow(first.slots.used)
        view = self._view(count)
        scores = self._score.importance(self._state(), view, None)
        protected: Tensor | None = self._score.protected(self._state(), view, 1)
        if first.padded:
            scores, protected = with_empty_slots(view, scores, protected, count)
        slot = lowest(scores, view.positions, protected)
        for layer in self._layers:
            slots = layer.slots
            slots.mark_for_reuse(slot.to(slots.device).expand(-1, slots.kv_heads), static=False)
        return slot

    def _make_room_for_block(self, count: Count) -> None:
        first = self._layers[0]
        if isinstance(count, Tensor):
            for layer in self._layers:
                layer.count_apart(layer.slots.batch, layer.slots.device)
        view = self._view(count)
        sinks = view.sinks(self._score.sinks) & (view.positions >= 0)
        used = first.slots.used
        if first.padded:
            fewest = torch.minimum(torch.as_tensor(view.held), sinks.sum(-1, keepdim=True))
            target = torch.maximum(torch.as_tensor(view.budget - count), fewest)
            self._cut(view, minimum(target, view.held), min(first.budget.max_budget, used))
            return
        kept = min(max(int(view.budget - count), self._score.sinks), used)
        if kept < used or not first.slots.ordered:  # layers put themselves in order at a block
            self._cut(view, kept, kept)

    # ---- after a forward

    def end_forward(self, logits: Tensor) -> None:
        """Note how unexpected the new tokens were."""
        new, self.arriving = self.arriving, None
        assert new is not None, "begin_forward comes before"
        first = self._layers[0]
        used = first.slots.used
        found, self.next_logits = read_surprisals(new, logits, self.next_logits)
        scores = found.to(first.slots.device)[:, None]
        table = self._grow(used)
        if new.slot is not None:
            table.scatter_(2, new.slot[..., None], scores)
            return
        table[:, :, used - scores.shape[2] : used] = scores
        if used > first.budget.min_budget:
            self._cut_to_budget()

    def _cut_to_budget(self) -> None:
        """Cut what a block has left above the budget: it was larger than the budget itself."""
        first = self._layers[0]
        view, slots, most = self._view(0), first.slots, first.budget.max_budget
        if first.padded:
            self._cut(view, minimum(view.held, view.budget), min(most, slots.used))
        elif slots.used > most:
            self._cut(view, most, most)
        if slots.capacity > most + 1:
            for layer in self._layers:
                layer.slots.shrink(layer.slots.sizing.growth.limit)
            self.end_prompt()

    # ---- the slots

    def _view(self, count: Count) -> SlotView:
        first = self._layers[0]
        return make_view(first, (), first.slots.positions[:, :1, : first.slots.used], count)

    def _state(self) -> dict[str, Tensor]:
        assert self.table is not None, "something is stored"
        return {"surprisal": self.table[:, :, : self._layers[0].slots.used]}

    def _cut(self, view: SlotView, target: Count, slots: int) -> None:
        """Keep `target` tokens of each batch entry, in ascending position."""
        state = self._state()
        forced = self._score.protected(state, view, view.held - target)
        scores = self._score.importance(state, view, None)
        chosen, positions = keep_top(scores, view.positions, target, forced, slots)
        kept = state["surprisal"].gather(2, chosen)
        if self._score.decay != 1:
            kept = self._let_decay(kept, view.held > target)
        self.table = _buffer(kept, slots)
        for layer in self._layers:
            used = layer.slots.used_slots()
            for part in layer.parts.at["note_scores"]:
                whole = torch.ones_like(used.positions)
                part.note_scores(scores * whole, view.positions * whole, forced & (whole > 0))
            place, places = chosen.to(layer.slots.device), positions.to(layer.slots.device)
            layer.slots.replace(Slots(take_stored(used.stored, place), places, {}))

    def _let_decay(self, kept: Tensor, cut: bool | Tensor) -> Tensor:
        """Surprisals after a cut, of the sequences that lost tokens and have not decayed."""
        cut = torch.as_tensor(cut, device=kept.device)
        decay = torch.where(cut, self._decay, 1.0)
        self._decay = torch.where(cut, 1.0, self._decay)
        return kept * decay

    def _grow(self, slots: int) -> Tensor:
        """Have a table of at least `slots` slots, as many as the layers have, and return it."""
        first = self._layers[0].slots
        width = max(slots, first.capacity)
        if self.table is None:
            self.table = _buffer(first.positions[:, :1, :0], width)
        elif self.table.shape[2] < width:
            self.table = _buffer(self.table, width)
        return self.table

    def end_prompt(self) -> None:
        """Give back the memory of slots that the layers no longer have."""
        capacity = self._layers[0].slots.capacity if self.table is not None else 0
        if self.table is not None and self.table.shape[2] > capacity:
            self.table = _buffer(self.table[:, :, :capacity], capacity)

    # ---- files

    def tensors(self) -> dict[str, Tensor]:
        scores, next_of_text = self.by_position()
        return {"state.surprisal": scores.cpu(), "state.next_logits": next_of_text.cpu()}

    def check(
        self, file: Any, slots: int | None, logits: tuple[int, int], dtype: torch.dtype
    ) -> None:
        file.take("state.surprisal", (file.batch, slots), torch.float32)
        floats = (torch.float32, torch.float64, dtype)
        file.take("state.next_logits", logits, floats, unknown=True)

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        scores, own = tensors["state.surprisal"], self._layers[0].slots.device
        self.table = _buffer(scores[:, None].to(own), scores.shape[1])
        self.next_logits = tensors["state.next_logits"].to(device)

    def by_position(self) -> tuple[Tensor, Tensor]:
        """Surprisals in ascending position, (batch, kept), and the logits that wait."""
        slots = self._layers[0].slots
        order = ascending(slots.stored_positions()[:, :1])[..., : slots.kept]
        assert self.next_logits is not None, "something has been read"
        return self._state()["surprisal"].gather(2, order)[:, 0], self.next_logits


def _buffer(content: Tensor, slots: int) -> Tensor:
    """Copy into a table of `slots` slots that can be written in and out of inference mode."""
    with torch.inference_mode(False):
        shape = (*content.shape[:2], slots)
        table = torch.zeros(shape, dtype=torch.float32, device=content.device)
    table[:, :, : content.shape[2]] = content
    return table
