"""Queries that a layer keeps for its policy: the newest, the last of a prompt, or their moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import Lanes, LayerSite, Part, tensor_bytes
from kvtool.cache.steps.attend_block import last_of_prompt
from kvtool.cache.steps.block import Block, store_block
from kvtool.cache.steps.call import Call
from kvtool.maths.attention import group_queries
from kvtool.maths.pairs import pair_count, pair_lengths
from kvtool.maths.rotation import Rotation
from kvtool.maths.selection import take
from kvtool.maths.statistics import add_moments, from_correlations, to_correlations
from kvtool.policies.evidence import MomentsAsked, QueryCentres, QueryMoments
from kvtool.policies.numbers import State
from kvtool.policies.parts import SlotView

_ROWS = 1024  # queries that are rotated at a time


class QueryWindow(Part):
    """The queries of the newest tokens of each batch entry, prompt or decoded.

    The row of a token is its position modulo the rows, so that a new one is written over the
    oldest without asking where that is.

    Attributes:
        rows: how many.
        query: (batch, heads, rows, head_dim), after RoPE; None before the first token.
        positions: (batch, rows) int64, -1 where there was none yet.
        scale, softcap: as for `kvtool.maths.attention.attention_weights`.
        sinks: (kv_heads, group) logits without a key; None: there are none.
    """

    name = "query_window"
    refusals: Mapping[str, str] = {
        "eager": "`{policy}` looks back from queries, "
        "and the eager attention of `{model}` does not show them",
        "latents": "`{policy}`",
    }

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.clear()

    @classmethod
    def make(cls, site: LayerSite) -> QueryWindow | None:
        rows = site.policy.newest_queries
        return cls(rows) if rows else None

    def clear(self) -> None:
        self.query: Tensor | None = None
        self.positions: Tensor | None = None
        self.scale: float = 1.0
        self.softcap: float | None = None
        self.sinks: Tensor | None = None

    def for_heads(self, lanes: Lanes) -> LaneQueries:
        return LaneQueries(self, lanes)

    def by_kv_head(self, kv_heads: int) -> tuple[Tensor, Tensor]:
        """Return queries as (batch, kv_heads, group, rows, head_dim), and which there are."""
        assert self.query is not None, "a prompt has been seen"
        assert self.positions is not None, "a prompt has been seen"
        return group_queries(self.query, kv_heads), self.positions >= 0

    def sinks_by_kv_head(self, kv_heads: int) -> Tensor | None:
        """Return the sinks as (kv_heads, group)."""
        return self.sinks

    @torch.no_grad()
    def see(self, query: Tensor, positions: Tensor, scale: float, softcap: float | None) -> None:
        """Take new queries, and keep the newest of all.

        Args:
            query: (batch, heads, q_len, head_dim).
            positions: (batch or 1, q_len) of them, -1 = padding.
        """
        self.scale, self.softcap = scale, softcap
        positions = positions.expand(len(query), -1)
        if self.query is not None and self.positions is not None:
            query = torch.cat([self.query, query], 2)
            positions = torch.cat([self.positions, positions], 1)
        else:
            query = functional.pad(query, (0, 0, self.rows, 0))
            positions = functional.pad(positions, (self.rows, 0), value=-1)
        self._keep(query, positions)

    @torch.no_grad()
    def see_token(
        self, query: Tensor, position: int | Tensor, scale: float, softcap: float | None
    ) -> None:
        """Take the query of a decoded token of every batch entry.

        Args:
            query: (batch, heads, 1, head_dim).
            position: one number, or (batch or 1, 1), -1 where an entry has padding instead.
        """
        assert self.query is not None, "a prompt has been seen"
        assert self.positions is not None, "a prompt has been seen"
        self.scale, self.softcap = scale, softcap
        if isinstance(position, Tensor):
            position = position.expand(len(query), 1)
            rows, valid = position % self.rows, position >= 0
            index = rows[:, None, :, None].expand_as(query)
            query = torch.where(valid[:, None, :, None], query, self.query.gather(2, index))
            self.query.scatter_(2, index, query)
            position = torch.where(valid, position, self.positions.gather(1, rows))
            self.positions.scatter_(1, rows, position)
        else:
            row = position % self.rows
            self.query.narrow(2, row, 1).copy_(query)
            self.positions.narrow(1, row, 1).fill_(position)

    def take_block(self, layer: SlotLayer, call: Call, block: Block) -> Block:
        self.sinks = None if call.sinks is None else call.sinks.detach()
        self.see(call.query, block.new, call.scale, call.softcap)
        return block

    def note_token(self, layer: SlotLayer, call: Call) -> None:
        newest: int | Tensor = layer.tokens_seen - 1
        if call.positions is not None:
            newest = call.positions
        elif isinstance(newest, Tensor):
            newest = newest[..., 0]
        if self.sinks is None and call.sinks is not None:  # the prompt was read from a file
            self.sinks = call.sinks.detach()
        self.see_token(call.query, newest, call.scale, call.softcap)

    def show(self, layer: SlotLayer, view: SlotView) -> SlotView:
        return replace(view, queries=(*view.queries, self))

    def stationary(self) -> list[Tensor]:
        return [each for each in (self.query, self.positions) if each is not None]

    def _keep(self, query: Tensor, positions: Tensor) -> None:
        """Keep copies of the newest of some sequences, each at its place."""
        order = positions.argsort(1)[:, -self.rows :]
        positions = positions.gather(1, order)
        rows = positions.remainder(self.rows)  # of those that are missing: one behind the others
        batch, heads, _, dim = query.shape
        newest = take(query, order[:, None].expand(-1, heads, -1))
        with torch.inference_mode(False):  # what is made inside it could not be written outside
            self.query = query.new_zeros(batch, heads, self.rows, dim)
            self.positions = positions.new_full((batch, self.rows), -1)
        self.query.scatter_(2, rows[:, None, :, None].expand_as(newest), newest)
        self.positions.scatter_(1, rows, positions)

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.query is not None and self.positions is not None:
            self.query, self.positions = change(self.query), change(self.positions)

    def tensors(self) -> dict[str, Tensor]:
        if self.query is None or self.positions is None:
            return {}
        order = self.positions.argsort(1)
        index = order[:, None].expand(-1, self.query.shape[1], -1)
        query, positions = take(self.query, index), self.positions.gather(1, order)
        return {"window.query": query, "window.positions": positions}

    def check(self, file: Any, prefix: str, shape: Any, dtype: torch.dtype) -> None:
        sizes = (file.batch, shape.heads, self.rows, shape.key_dim)
        file.take(f"{prefix}window.query", sizes, dtype)
        places = (file.batch, self.rows)
        file.take(f"{prefix}window.positions", places, torch.int64, -1, file.seen - 1)

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._keep(tensors["window.query"], tensors["window.positions"])

    @property
    def nbytes(self) -> int:
        held = (self.query, self.positions)
        return tensor_bytes([tensor for tensor in held if tensor is not None])


class LaneQueries(Part):
    """The newest queries of some heads, in the layer that holds their tokens apart."""

    name = "lane_queries"
    joins_decode = False

    def __init__(self, whole: QueryWindow, lanes: Lanes) -> None:
        self._whole, self._lanes = whole, lanes

    @property
    def scale(self) -> float:
        return self._whole.scale

    @property
    def softcap(self) -> float | None:
        return self._whole.softcap

    @property
    def positions(self) -> Tensor | None:
        positions = self._whole.positions
        return None if positions is None else positions[self._lanes.entries]

    def sinks_by_kv_head(self, kv_heads: int) -> Tensor | None:
        """Return logits without a key as (lanes, 1, group)."""
        sinks = self._whole.sinks
        return None if sinks is None else sinks[self._lanes.heads][:, None]

    def by_kv_head(self, kv_heads: int) -> tuple[Tensor, Tensor]:
        """Return queries as (lanes, 1, group, rows, head_dim), and which there are."""
        query, valid = self._whole.by_kv_head(self._lanes.kv_heads)
        entries = self._lanes.entries
        return query[entries, self._lanes.heads][:, None], valid[entries]

    def show(self, layer: SlotLayer, view: SlotView) -> SlotView:
        return replace(view, queries=(*view.queries, self))


class LastQueries(Part):
    """The queries that a policy will look back from, of a prompt that is stored until its end.

    Attributes:
        seen: (batch, heads, rows, head_dim) and their positions, (batch or 1, rows), -1 = padding;
            None before the first block.
    """

    name = "last_queries"

    def __init__(self) -> None:
        self.clear()

    @classmethod
    def make(cls, site: LayerSite) -> LastQueries | None:
        return cls() if site.policy.two_stages else None

    def clear(self) -> None:
        self.seen: tuple[Tensor, Tensor] | None = None

    def take_block(self, layer: SlotLayer, call: Call, block: Block) -> Block | None:
        block = replace(block, earlier=self.seen)
        if not call.context.last:
            self.seen = last_of_prompt(layer, call, block)
            store_block(layer, block, call.raw_key, call.raw_value)
            return None
        if self.seen is None:
            return block
        places = self.seen[1]
        count = (places >= 0).sum(1)[:, None, None] if layer.padded else places.shape[1]
        return replace(block, view=replace(block.view, block=block.view.block + count))

    def end_block(self) -> None:
        self.clear()

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.seen is not None:
            query, places = self.seen
            self.seen = change(query), change(places.expand(len(query), -1))


class Moments(Part):
    """Count, mean and scatter of a layer's queries before RoPE, of each sequence and query head.

    Attributes:
        asked: what of them the policy wants.
        rotation: how the layer turns its queries; None: it does not.
        shows_tokens: whether the policy looks at them while tokens are decoded, too.
        centres: of queries of other texts, in place of the prompt's own; None: there are none.
        state: `count` (batch, heads), `mean` (batch, heads, head_dim) and, where they are wanted,
            `scatter` (batch, heads, head_dim, head_dim) and `lengths` (batch, heads, pairs), all
            float32; empty before the first block. When the last block of a prompt has been scored,
            `squares` and `correlations` take the place of `scatter`: see `to_correlations`.
    """

    name = "moments"
    joins_decode = False

    def __init__(
        self,
        asked: MomentsAsked,
        rotation: Rotation | None,
        *,
        shows_tokens: bool = False,
        centres: QueryCentres | None = None,
    ) -> None:
        self.asked, self.rotation, self.shows_tokens = asked, rotation, shows_tokens
        self.centres = centres
        self._scale: float = 1.0  # of the logits of the running attention
        self.clear()

    @classmethod
    def make(cls, site: LayerSite) -> Moments | None:
        asked = site.policy.moments
        if asked is None:
            return None
        always = site.policy.score.when == "always"
        return cls(asked, site.rotation, shows_tokens=always, centres=site.centres)

    def clear(self) -> None:
        self.state: State = {}

    @torch.no_grad()
    def take_block(self, layer: SlotLayer, call: Call, block: Block) -> Block:
        """Add a block's queries, rotated back to before RoPE, in parts of bounded size.

        Queries and keys keep what a model multiplies both by beside the rotation (YaRN): so do the
        logits that it computes of them.
        """
        self._scale = call.scale
        if self.centres is not None:
            self._take(self.centres, layer, call.query)
            return self._shown(block)
        for start in range(0, call.q_len, _ROWS):
            rows = slice(start, start + _ROWS)
            query, positions = call.query[:, :, rows].float(), block.new[:, rows]
            if self.rotation is not None:
                back = -positions.clamp(min=0)[:, None].float()
                query = self.rotation.shift(query, back)
            self.add(query, positions >= self.asked.sinks)
        block = self._shown(block)
        if call.context.last:
            self._round()
        return block

    def _round(self) -> None:
        """Hold the scatter in fewer bits, until the next prompt comes."""
        scatter = self.state.pop("scatter", None)
        if scatter is not None:
            self.state["squares"], self.state["correlations"] = to_correlations(scatter)

    def _shown(self, block: Block) -> Block:
        return replace(block, view=replace(block.view, moments=(self.summary(),)))

    def _take(self, centres: QueryCentres, layer: SlotLayer, query: Tensor) -> None:
        """Take the centres of the heads that are held here, of which no query counts."""
        if self.state:
            return
        batch, heads = query.shape[:2]
        self.state = {"count": query.new_zeros(batch, heads, dtype=torch.float32)}
        for name, number in (("mean", centres.mean), ("lengths", centres.lengths)):
            own = layer.slots.heads.own(number[None]).to(query.device)
            self.state[name] = own.repeat(batch, 1, 1)

    def add(self, query: Tensor, valid: Tensor) -> None:
        """Take in queries before RoPE, (batch, heads, tokens, head_dim) float32, where `valid`."""
        batch, heads, _, dim = query.shape
        if not self.state:
            self.state = {"count": query.new_zeros(batch, heads)}
            self.state["mean"] = query.new_zeros(batch, heads, dim)
            if self.asked.covariance:
                self.state["scatter"] = query.new_zeros(batch, heads, dim, dim)
        sums = add_moments(self.state["count"], self.state["mean"], self._scatter(), query, valid)
        names = ("count", "mean", "scatter")
        state = {k: t for k, t in zip(names, sums, strict=True) if t is not None}
        if self.asked.lengths:
            own = pair_lengths(query) if self.rotation is None else self.rotation.lengths(query)
            before = self.state.get("lengths", torch.zeros_like(own[:, :, 0]))
            state["lengths"] = add_moments(self.state["count"], before, None, own, valid)[1]
        self.state = state

    def _scatter(self) -> Tensor | None:
        if "correlations" in self.state:
            return from_correlations(self.state["squares"], self.state["correlations"])
        return self.state.get("scatter")

    def show(self, layer: SlotLayer, view: SlotView) -> SlotView:
        if not (self.state and self.shows_tokens):
            return view
        return replace(view, moments=(*view.moments, self.summary()))

    def summary(self) -> QueryMoments:
        """Return them as a score sees them."""
        covariance = self._scatter()
        if covariance is not None:
            covariance = covariance / self.state["count"].clamp(min=1)[..., None, None]
        mean, lengths = self.state["mean"], self.state.get("lengths")
        return QueryMoments(mean, covariance, self._scale, self.rotation, lengths)

    def for_heads(self, lanes: Lanes) -> LaneMoments | None:
        return LaneMoments(self, lanes) if self.shows_tokens else None

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        self.state = {name: change(number) for name, number in self.state.items()}

    def tensors(self) -> dict[str, Tensor]:
        return {f"moments.{name}": number for name, number in self.state.items()}

    def check(self, file: Any, prefix: str, shape: Any, dtype: torch.dtype) -> None:
        heads, dim = (file.batch, shape.heads), shape.key_dim
        count = file.take(f"{prefix}moments.count", heads, torch.float32, 0, file.seen)
        if not torch.equal(count, count.round()):
            raise file.bad(f"{prefix}moments.count", "holds parts of a query")
        file.take(f"{prefix}moments.mean", (*heads, dim), torch.float32)
        if self.asked.covariance and f"{prefix}moments.scatter" not in file.left:
            file.take(f"{prefix}moments.squares", (*heads, dim), torch.float32, 0)
            codes = (*heads, dim * (dim - 1) // 2)
            file.take(f"{prefix}moments.correlations", codes, torch.int8, -127, 127)
        elif self.asked.covariance:  # of an older kvtool
            scatter = file.take(f"{prefix}moments.scatter", (*heads, dim, dim), torch.float32)
            if (scatter.diagonal(dim1=2, dim2=3) < 0).any():
                raise file.bad(f"{prefix}moments.scatter", "holds a variance below 0")
        if self.asked.lengths:
            sizes = (*heads, pair_count(dim))
            file.take(f"{prefix}moments.lengths", sizes, torch.float32, 0)

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        names = ("count", "mean", "squares", "correlations", "scatter", "lengths")
        found = {name: tensors.get(f"moments.{name}") for name in names}
        self.state = {name: number for name, number in found.items() if number is not None}
        self._round()

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.state.values())


class LaneMoments(Part):
    """The moments of the queries of some heads, in the layer that holds their tokens apart."""

    name = "lane_moments"
    joins_decode = False

    def __init__(self, whole: Moments, lanes: Lanes) -> None:
        self._whole, self._lanes = whole, lanes

    def show(self, layer: SlotLayer, view: SlotView) -> SlotView:
        found = self._whole.summary()
        of_heads, lengths = self._lanes.of_query_heads, found.lengths
        own = replace(
            found,
            mean=of_heads(found.mean),
            covariance=None if found.covariance is None else of_heads(found.covariance),
            lengths=None if lengths is None else of_heads(lengths),
        )
        return replace(view, moments=(*view.moments, own))
