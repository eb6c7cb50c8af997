"""The surprisal of every kept token, one number for all layers, and the cuts that go by it.

Layers of free budget hold the same tokens in the same slots, so one table serves them all. Before a
forward `make_room` cuts every layer, so that the new tokens fit; after it `learn` reads the logits.
The logits of the last token stay until the next token is known, whose surprisal they give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.cache.eviction import held_slots
from kvtool.cache.slots import SlotLayer
from kvtool.maths.selection import keep_top, lowest, take
from kvtool.maths.surprisal import surprisals
from kvtool.policies.numbers import Count, minimum
from kvtool.policies.parts import SlotView
from kvtool.policies.scores.sirllm import SirLLM


@dataclass(frozen=True)
class Arriving:
    """Tokens of the running forward.

    Attributes:
        tokens: (batch, q_len) int64.
        valid: (batch, q_len), False = padding; None: no padding.
        begun: (batch,) whether anything of the row was read before; None: the same for all rows.
        slot: (batch, 1) that a decoded token takes; None where tokens are appended.
    """

    tokens: Tensor
    valid: Tensor | None
    begun: Tensor | None
    slot: Tensor | None = None

    @property
    def count(self) -> Count:
        """New tokens of each row."""
        return self.tokens.shape[1] if self.valid is None else self.valid.sum(1)[:, None, None]


class Surprisals:
    """What a policy that goes by the model's logits knows, and how it cuts all layers.

    Attributes:
        table: (batch, 1, capacity) float32, by slot; None while nothing is stored.
        next_logits: (batch, vocab) in the model's dtype, after the last token of each row.
        arriving: what the running forward reads, None between forwards.
    """

    def __init__(self, layers: list[SlotLayer], score: SirLLM) -> None:
        self._layers = [layer for layer in layers if layer.window is None]
        self._score = score
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        self.table: Tensor | None = None
        self.next_logits: Tensor | None = None
        self.arriving: Arriving | None = None
        self._decay: float | Tensor = 1.0  # at the next cut of this turn, of each row

    def begin_turn(self) -> None:
        """Say that a prompt begins: its first cut lets what was kept before decay."""
        self._decay = self._score.decay

    def choose_rows(self, choose: Callable[[Tensor], Tensor]) -> None:
        """Let what is known of each row follow the rows."""
        if self.table is not None:
            self.table, self.next_logits = choose(self.table), choose(self.next_logits)

    @property
    def bytes(self) -> int:
        """Bytes of the table and of the logits that wait for the next token."""
        if self.table is None:
            return 0
        return sum(t.numel() * t.element_size() for t in (self.table, self.next_logits))

    # ---- before a forward

    def make_room(self, tokens: Tensor, valid: Tensor | None, decoding: bool) -> None:
        """Cut every layer so that the new tokens fit the budget.

        Args:
            tokens: (batch, q_len) int64.
            valid: (batch, q_len) bool, False = padding; None: no padding.
            decoding: whether the token takes a slot in place.
        """
        first = self._layers[0]
        begun = first.lengths > 0 if first.ragged else None
        slot = None
        if decoding and first.used >= first.least:
            slot = self._free_slot(valid)
        self.arriving = new = Arriving(tokens, valid, begun, slot)
        if not decoding and first.used:
            self._make_room_for_block(new.count)

    def _free_slot(self, valid: Tensor | None) -> Tensor:
        """Choose the slot that a decoded token takes in every layer: (batch, 1)."""
        first = self._layers[0]
        count: Count = 1
        if first.ragged:
            for layer in self._layers:
                layer.fill_to(layer.most + 1)
            if valid is not None:
                count = valid.sum(1)[:, None, None]
        self._grow(first.used)
        view = self._view(count)
        scores = self._score.importance(self._state(), view, None)
        protected = self._score.protected(self._state(), view, 1)
        if first.ragged:
            # a row below its budget takes an empty slot, as does one that has no token
            empty = view.positions < 0
            over = view.held + count > view.budget
            scores = scores.masked_fill(empty & ~over, float("-inf"))
            protected = (protected & over) | (empty & over)
        slot = lowest(scores, view.positions, protected)
        for layer in self._layers:
            layer.pending = slot.to(layer.device).expand(-1, layer.positions.shape[1])
        return slot

    def _make_room_for_block(self, count: Count) -> None:
        first = self._layers[0]
        if isinstance(count, Tensor) and not first.ragged:
            for layer in self._layers:
                rows = (first.batch_size,)
                layer.lengths = torch.full(rows, layer.seen, device=layer.device)
        view = self._view(count)
        sinks = view.sinks(self._score.sinks) & (view.positions >= 0)
        if first.ragged:
            least = torch.minimum(view.held, sinks.sum(-1, keepdim=True))
            room = torch.maximum(torch.as_tensor(view.budget - count), least)
            self._cut(view, minimum(room, view.held), min(first.most, first.used))
            return
        room = min(max(view.budget - count, self._score.sinks), first.used)
        if room < first.used or not first.ordered:  # layers put themselves in order at a block
            self._cut(view, room, room)

    # ---- after a forward

    def learn(self, logits: Tensor) -> None:
        """Note how unexpected the new tokens were.

        Args:
            logits: (batch, q_len, vocab) of the forward.
        """
        new, self.arriving = self.arriving, None
        first = self._layers[0]
        scores = self._surprisals(new, logits).to(first.device)[:, None]
        self._grow(first.used)
        if new.slot is not None:
            self.table.scatter_(2, new.slot[..., None], scores)
            return
        self.table[:, :, first.used - scores.shape[2] : first.used] = scores
        if first.used > first.least:
            self._cut_to_budget()

    def _cut_to_budget(self) -> None:
        """Cut what a block has left above the budget: it was larger than the budget itself."""
        first = self._layers[0]
        view = self._view(0)
        if first.ragged:
            self._cut(view, minimum(view.held, view.budget), min(first.most, first.used))
        elif first.used > first.most:
            self._cut(view, first.most, first.most)
        if first.capacity > first.most + 1:
            for layer in self._layers:
                layer.shrink(layer.limit)
            self.fit()

    def _surprisals(self, new: Arriving, logits: Tensor) -> Tensor:
        """Surprisal of each new token, (batch, q_len) float32; keeps the logits of the last one."""
        tokens = new.tokens.to(logits.device)
        valid = None if new.valid is None else new.valid.to(logits.device)
        columns = torch.arange(tokens.shape[1], device=logits.device).expand_as(tokens)
        last = columns if valid is None else torch.where(valid, columns, -1).cummax(1).values
        before = functional.pad(last[:, :-1], (1, 0), value=-1)  # the token before, -1: none here
        known = self.next_logits
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
        self.next_logits = _last(logits, valid, last, known)
        return scores

    # ---- the slots

    def _view(self, count: Count) -> SlotView:
        first = self._layers[0]
        positions = first.positions[:, :1, : first.used]
        return SlotView(
            values=(),
            positions=positions,
            tokens_seen=first.count,
            budget=first.budget,
            held=held_slots(first, positions),
            block=count,
        )

    def _state(self) -> dict[str, Tensor]:
        return {"surprisal": self.table[:, :, : self._layers[0].used]}

    def _cut(self, view: SlotView, target: Count, slots: int) -> None:
        """Keep `target` tokens of each row, in ascending position.

        Args:
            slots: the largest target, or more.
        """
        state = self._state()
        forced = self._score.protected(state, view, view.held - target)
        scores = self._score.importance(state, view, None)
        chosen, positions = keep_top(scores, view.positions, target, forced, slots)
        kept = state["surprisal"].gather(2, chosen)
        if self._score.decay != 1:
            kept = self._let_decay(kept, view.held > target)
        self.table = _buffer(kept, slots)
        for layer in self._layers:
            place = chosen.to(layer.device)
            keys, values = (t[:, :, : layer.used] for t in (layer.keys, layer.values))
            layer.replace(take(keys, place), take(values, place), positions.to(layer.device), {})

    def _let_decay(self, kept: Tensor, cut: bool | Tensor) -> Tensor:
        """Surprisals after a cut, of the rows that lost something and have not decayed before."""
        cut = torch.as_tensor(cut, device=kept.device)
        decay = torch.where(cut, self._decay, 1.0)
        self._decay = torch.where(cut, 1.0, self._decay)
        return kept * decay

    def _grow(self, slots: int) -> None:
        """Have room for so many slots, as many as the layers have."""
        first = self._layers[0]
        width = max(slots, first.capacity)
        if self.table is None:
            self.table = _buffer(first.positions[:, :1, :0], width)
        elif self.table.shape[2] < width:
            self.table = _buffer(self.table, width)

    def fit(self) -> None:
        """Give back the memory of slots that the layers no longer have."""
        capacity = self._layers[0].capacity
        if self.table is not None and self.table.shape[2] > capacity:
            self.table = _buffer(self.table[:, :, :capacity], capacity)

    # ---- files

    def by_position(self) -> tuple[Tensor, Tensor]:
        """Surprisals in ascending position, (batch, kept), and the logits that wait."""
        first = self._layers[0]
        positions = first.stored_positions()[:, :1]
        end = torch.iinfo(positions.dtype).max
        order = positions.masked_fill(positions < 0, end).argsort(-1)[..., : first.kept]
        return self._state()["surprisal"].gather(2, order)[:, 0], self.next_logits

    def fill(self, scores: Tensor, next_logits: Tensor) -> None:
        """Take what a file holds; see `by_position`."""
        device = self._layers[0].device
        self.table = _buffer(scores[:, None].to(device), scores.shape[1])
        self.next_logits = next_logits


def _last(logits: Tensor, valid: Tensor | None, last: Tensor, known: Tensor | None) -> Tensor:
    """Copy the logits after the last token of each row: (batch, vocab)."""
    if valid is None:
        return logits[:, -1].clone()
    rows = torch.arange(logits.shape[0], device=logits.device)
    found = logits[rows, last[:, -1].clamp(min=0)]
    if known is None:
        return found
    return torch.where((last[:, -1] >= 0)[:, None], found, known)


def _buffer(content: Tensor, slots: int) -> Tensor:
    """Copy into a table of so many slots that can be written in and out of inference mode."""
    with torch.inference_mode(False):
        shape = (*content.shape[:2], slots)
        table = torch.zeros(shape, dtype=torch.float32, device=content.device)
    table[:, :, : content.shape[2]] = content
    return table
