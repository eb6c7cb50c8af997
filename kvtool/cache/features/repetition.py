"""Repeat a cache's prompt before it is cut, by the weights that its slots receive.

A repetition is attended and not stored: the cache stays as it is, but for recurrent layers, whose
state the caller rolls back. Then all layers are cut at once. A prompt that is read in blocks is
repeated and cut block by block. What stays keeps its weights, beside its slots, until the last cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtool.cache.features.cache_part import Budgets, CachePart
from kvtool.cache.features.cuts import HeadBudgets
from kvtool.cache.features.held_queries import HeldQueries, joined, spread_queries
from kvtool.cache.features.shown import Projection
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.ragged import RaggedBuffers
from kvtool.cache.steps.attend import call_weights
from kvtool.cache.steps.attend_block import attend_plain
from kvtool.cache.steps.block import Block, cut, note_scores
from kvtool.cache.steps.bucket_calls import beside_slots, bucket_calls
from kvtool.cache.steps.call import Call
from kvtool.cache.steps.view import make_view, score, used_view
from kvtool.errors import KvtoolError, UsageError
from kvtool.maths.projection import weights_by_output
from kvtool.maths.selection import take
from kvtool.policies.allocate.problem import Heads
from kvtool.policies.evidence import PromptQueries, Repeated, RepetitionAsked
from kvtool.policies.numbers import State, at_least_zero
from kvtool.policies.parts import SlotView
from kvtool.policies.policy import Policy

_ROWS = 128  # queries whose weights are held at a time
_WEIGHT = "repeated"  # what a weight is called beside its slot, until the prompt ends


@dataclass(frozen=True)
class Instructions:
    """What goes around a prompt that is repeated, in tokens.

    Attributes:
        first: token ids before the first chunk.
        later: before every other one.
        before, behind: tokens of the prompt around its text, which are not repeated.
    """

    first: tuple[int, ...]
    later: tuple[int, ...]
    before: int = 0
    behind: int = 0


class RepeatedWeights:
    """The highest weights that tokens of a block receive while it is repeated.

    Attributes:
        sinks: number of first tokens that are attended to beside the running chunk.
        spans: first and last position, excluded, of what is repeated of each batch entry.
        starts, ends: the same of the running chunk; equal where an entry has none.
        by_layer: (batch, kv_heads, tokens) float32 of each layer, by its index; of the tokens from
            the first of `spans` on, 0 behind the last.
        queries: of each layer, by its index, those that repair what it keeps. A rollback, as
            recurrent layers need it, would forget them in the layer.
    """

    def __init__(self, sinks: int, spans: Sequence[tuple[int, int]]) -> None:
        self.sinks, self.spans = sinks, spans
        self.queries: dict[int, PromptQueries] = {}
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.by_layer: dict[int, Tensor] = {}

    def begin_chunk(self, spans: Sequence[tuple[int, int]]) -> None:
        """Say which tokens of each batch entry the next forward repeats."""
        self.starts, self.ends = [start for start, _ in spans], [end for _, end in spans]

    def attend(self, layer: SlotLayer, call: Call) -> Tensor:
        """Attend tokens that are not stored, and note their weights on those that they repeat."""
        if layer.reads_apart and isinstance(layer.ragged, RaggedBuffers):
            return self._attend_ragged(layer, layer.ragged, call)
        block = _lay_out(layer, call)
        out = attend_plain(layer, call, block)
        if layer.window is None:
            self._add(layer.index, self._weights(layer, call, block))
            self._note_queries(layer, call, block)
        return out

    def _attend_ragged(self, layer: SlotLayer, ragged: RaggedBuffers, call: Call) -> Tensor:
        """Do the same where KV heads hold different counts, by bucket."""
        outs, weights, entries = [], [], iter(ragged.split(ragged.entries))
        for bucket, step in bucket_calls(ragged, call, beside_slots):
            block = _lay_out(bucket, step)
            outs.append(attend_plain(bucket, step, block))
            weights.append(self._weights(bucket, step, block, next(entries)))
        self._add(layer.index, ragged.put_back(torch.cat(weights))[:, :, 0])
        return ragged.put_back(torch.cat(outs)).flatten(1, 2)

    def _note_queries(self, layer: SlotLayer, call: Call, block: Block) -> None:
        """Keep some of the queries that repeat the chunk, at equal steps over all chunks."""
        rows = layer.policy.shown_queries
        if rows:
            chunk = list(zip(self.starts, self.ends, strict=True))
            own = spread_queries(call, block.new, self.spans, chunk, rows)
            before = self.queries.get(layer.index)
            self.queries[layer.index] = own if before is None else joined(before, own)

    def _slots(
        self, positions: Tensor, padded: bool, entries: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Find the slots of the first tokens and of the running chunk, none of which was cut.

        Args:
            positions: (batch, slots) in ascending order but for padding, -1.
            padded: whether there is any.
            entries: (batch,) int64, whose chunk it is; None: each its own.

        Returns:
            (batch, sinks + longest chunk) int64 indices, and which of them are tokens.
        """
        device = positions.device
        starts, ends = (torch.tensor(t, device=device)[:, None] for t in (self.starts, self.ends))
        width = max(end - start for start, end in zip(self.starts, self.ends, strict=True))
        if entries is not None:
            starts, ends = starts[entries], ends[entries]
        sinks = torch.arange(self.sinks, device=device).expand(len(starts), -1)
        chunk = starts + torch.arange(width, device=device)
        wanted = torch.cat([sinks, chunk], 1).to(positions.dtype)
        there = torch.cat([(sinks < starts) & (ends > starts), chunk < ends], 1)
        order = positions.argsort(-1) if padded else None
        known = positions.contiguous() if order is None else positions.gather(1, order)
        place = torch.searchsorted(known, wanted).clamp(max=positions.shape[1] - 1)
        return place if order is None else order.gather(1, place), there

    def _weights(
        self, layer: SlotLayer, call: Call, block: Block, entries: Tensor | None = None
    ) -> Tensor:
        """Return the highest weight on each token of the chunk, of all queries and of a group.

        Args:
            entries: as for `_slots`.

        Returns:
            (batch, kv_heads, longest chunk) float32, 0 behind a shorter one.
        """
        kept, new = block.kept, block.new.expand(call.query.shape[0], -1)
        index, there = self._slots(layer.slots.positions[:, 0, :kept], layer.padded, entries)
        key = torch.cat([take(call.key[:, :, :kept], index[:, None]), call.key[:, :, kept:]], 2)
        valid, place = new >= 0, torch.arange(call.q_len, device=new.device)
        weights = [call.query.new_zeros(*call.query.shape[:2], index.shape[1]).float()]
        hidden, lengths = _by_output(layer, call, index, entries)
        for start in range(0, call.q_len, _ROWS):
            rows = slice(start, start + _ROWS)
            own = (place <= place[rows, None]) & valid[:, None]
            seen = torch.cat([there[:, None].expand(-1, own.shape[1], -1), own], 2)[:, None, None]
            found = call_weights(call, call.query[:, :, rows], key, seen)[..., : index.shape[1]]
            if hidden is not None and lengths is not None:
                found = weights_by_output(found, lengths, hidden[:, rows])
            top = found.masked_fill_(~valid[:, None, None, rows, None], 0).amax(3)
            weights.append(torch.maximum(weights.pop(), top.flatten(1, 2)))
        best = weights[0].unflatten(1, (layer.slots.kv_heads, -1)).amax(2)
        return (best * there[:, None])[:, :, self.sinks :]

    def _add(self, layer: int, weights: Tensor) -> None:
        """Note the weights on a chunk behind those on the chunks before."""
        before = [self.by_layer[layer]] if layer in self.by_layer else []
        self.by_layer[layer] = torch.cat([*before, weights], 2)

    def beside(self, layer: int, positions: Tensor, before: Tensor | None) -> Tensor:
        """Return the weight of each slot: of this block's tokens, or as it was noted before.

        Args:
            positions: (batch, kv_heads, slots) of the layer, -1 = empty.
            before: what was noted; None: nothing yet.
        """
        if before is None:
            before = torch.zeros_like(positions, dtype=torch.float32)
        noted = self.by_layer.get(layer)
        if noted is None or noted.shape[2] == 0:
            return before
        first = torch.tensor([start for start, _ in self.spans], device=positions.device)
        place = positions.long() - first[:, None, None]
        new = (place >= 0) & (place < noted.shape[2])
        own = noted.to(place.device).gather(2, place.clamp(0, noted.shape[2] - 1))
        return torch.where(new, own, before)


class Repetition(CachePart):
    """What a cache knows of how its prompt is repeated; later texts are appended.

    Attributes:
        asked: what the score wants.
        instructions: in tokens; None without a tokenizer.
        ended: whether the prompt has been cut, or fits.
        driven: whether the caller that feeds a prompt will repeat it.
    """

    name = "repetition"
    refusals: ClassVar[Mapping[str, str]] = {
        "eager": "`{policy.score.name}` looks back from queries, "
        "and the eager attention of `{model}` does not show them",
        "joined": "it reads each prompt a second time",
    }

    def __init__(self, layers: list[SlotLayer], policy: Policy, asked: RepetitionAsked) -> None:
        self._layers, self._name, self.asked = layers, policy.score.name, asked
        self.instructions: Instructions | None = None
        self.clear()

    @classmethod
    def serves(cls, policy: Policy) -> bool:
        return policy.repetition is not None

    @classmethod
    def make(cls, layers: list[SlotLayer], policy: Policy) -> Repetition | None:
        asked, free = policy.repetition, [layer for layer in layers if layer.window is None]
        return None if asked is None else cls(free, policy, asked)

    def clear(self) -> None:
        """Forget the text, and what was around it."""
        self.ended = self.driven = False
        if self.instructions is not None:
            self.instructions = replace(self.instructions, before=0, behind=0)

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Note that the prompt of a file has been cut."""
        self.ended = True

    def instruct(self, instructions: Instructions) -> None:
        """Say what goes around the prompt that comes."""
        self.instructions = instructions

    def announce(self) -> None:
        """Say that a prompt is fed which will be repeated (UsageError: there is no tokenizer)."""
        if self.ended:
            return
        if self.instructions is None:
            raise UsageError(
                f"policy `{self._name}` tells the model to repeat its prompt, "
                "and there is no tokenizer to say so with",
                hint="compress(model, cache, ids, tokenizer=tokenizer)",
            )
        self.driven = True

    def reads_to(self, lengths: list[int], budgets: Budgets) -> list[int]:
        """Return the end of each entry's repetition, if it is cut and has one."""
        if self.ended:
            return lengths
        known = budgets(lengths) or [0] * len(lengths)
        pairs = zip(lengths, known, strict=True)
        return [length + self._longest_pass(length) * (length > own) for length, own in pairs]

    def _longest_pass(self, tokens: int) -> int:
        """Return how many tokens a forward feeds at most that repeats a part of `tokens` tokens."""
        instructions = self.instructions
        if instructions is None:
            return 0
        around = max(len(instructions.first), len(instructions.later) + self.asked.lead)
        return around + min(tokens, self.asked.chunk)

    def check_tokens(self, decoding: bool) -> None:
        """Refuse a prompt that a plain forward feeds: it will not be repeated (KvtoolError)."""
        if not (decoding or self.ended or self.driven):
            raise KvtoolError(
                f"policy `{self._name}` has a prompt repeated before it is cut, "
                "and a plain forward, or `generate` of transformers, reads it once",
                hint="kvtool.compress(..) or kvtool.generate(..); from then on the model's own",
            )

    def begin_block(self, layer: SlotLayer) -> None:
        """Have buffers of a prompt's size until it is cut."""
        layer.grow_exactly(layer.window is None and not self.ended)

    def cut(
        self,
        weights: RepeatedWeights | None,
        spans: Sequence[tuple[int, int]],
        *,
        last: bool = True,
    ) -> None:
        """Cut a prompt by the weights of its repetition; what comes behind it is appended.

        Args:
            weights: None where all of it fits.
            spans: first and last position, excluded, of what is repeated of each batch entry.
            last: whether no block of it comes any more.
        """
        if weights is not None:
            cut_repeated(self._layers, weights, spans, last=last)
        if last:
            for layer in self._layers:
                layer.grow_exactly(False)
            self.ended, self.driven = True, False


def _lay_out(layer: SlotLayer, call: Call) -> Block:
    """Lay out the slots and the tokens behind them; nothing is counted."""
    new, slots, device = call.positions, layer.slots, call.query.device
    if new is None:
        places = torch.arange(call.q_len, device=device)
        new = (layer.seen if layer.lengths is None else layer.lengths[:, None]) + places
        new = new.view(-1, call.q_len)
    kept = call.raw_key.shape[2] - call.q_len
    behind = new.to(torch.int32)[:, None].expand(slots.batch, slots.kv_heads, -1)
    positions = torch.cat([slots.positions[:, :, :kept], behind], 2)
    return Block(new, make_view(layer, (call.value,), positions, call.q_len), {}, kept)


def _by_output(
    layer: SlotLayer, call: Call, index: Tensor, entries: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the hidden states of a repetition, and how long the values of slots are projected."""
    projection = Projection.of(layer)
    if not layer.policy.repeats_by_output or projection is None:
        return None, None
    values = take(call.value, index[:, None])
    hidden = call.context.shown_hidden()
    hidden = hidden if entries is None else hidden[entries]
    return hidden, projection.seen().lengths(values, 2)


def cut_repeated(
    layers: Sequence[SlotLayer],
    weights: RepeatedWeights,
    spans: Sequence[tuple[int, int]],
    *,
    last: bool = True,
) -> None:
    """Cut layers that hold a prompt whole, or what it has kept and a block, all at once.

    Args:
        spans: first and last position, excluded, of what of each batch entry competes.
        last: whether the prompt ends; until then what stays keeps its weight.
    """
    judged = _Judged(layers, weights, spans)
    split = HeadBudgets.expected(layers[0]).split
    for i, own in enumerate(split.tokens_of(judged)):
        layer, held = layers[i], HeldQueries.of(layers[i])
        view, state, importance, protected = judged.scored(i)
        note_scores(layer, view, importance, protected)
        if held is not None:
            held.take(weights.queries[layer.index])
        if last:
            del state[_WEIGHT]
            layer.grow_exactly(False)
        cut(layer, view, state, None, importance, protected, layer.slots.heads.own(own))


class _Judged(Sequence[Heads]):
    """The heads of layers that are cut at once, made for a layer at a time, to hold no more."""

    def __init__(
        self,
        layers: Sequence[SlotLayer],
        weights: RepeatedWeights,
        spans: Sequence[tuple[int, int]],
    ) -> None:
        self._layers, self._weights, self._spans = layers, weights, spans

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: Any) -> Any:
        layer = self._layers[index]
        view, _, importance, protected = self.scored(index)
        return HeadBudgets.expected(layer).heads_of(layer, view, importance, protected)

    def scored(self, index: int) -> tuple[SlotView, State, Tensor, Tensor | None]:
        """Return a layer's slots as the policy sees them, their numbers, and what it says."""
        layer = self._layers[index]
        if layer.reads_apart and isinstance(layer.ragged, RaggedBuffers):
            view, state = make_view(layer, (), layer.stored_positions()), layer.ragged.state()
        else:
            layer.compact()
            view, state = used_view(layer), layer.slots.used_slots().state
        places = view.positions
        starts, ends = torch.tensor(self._spans, device=places.device).T[..., None, None]
        state[_WEIGHT] = self._weights.beside(layer.index, places, state.get(_WEIGHT))
        repeated = Repeated(state[_WEIGHT], (places >= starts) & (places < ends))
        view = replace(view, repeated=repeated)
        evicted = at_least_zero(view.held - layer.budget.tokens)
        return view, state, *score(layer.policy, view, state, None, evicted)
