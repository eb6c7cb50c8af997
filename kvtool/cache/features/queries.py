"""Queries that a layer keeps for its policy: the newest, the last of a prompt, or their moments.

The newest queries are for a policy that looks back from them whenever it cuts. The last queries of
a prompt are for one that is read in blocks and cut once, at its end. The moments of all queries so
far are for a score that looks ahead by them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.cache.slots.part import Part, tensor_bytes
from kvtool.maths.attention import group_queries
from kvtool.maths.rotation import Rotation
from kvtool.maths.selection import take
from kvtool.maths.statistics import add_moments
from kvtool.policies.evidence import MomentsAsked, QueryMoments
from kvtool.policies.numbers import State


class QueryWindow(Part):
    """The queries of the newest tokens of each batch entry, prompt or decoded.

    The row of a token is its position modulo the rows, so that a new one is written over the
    oldest without asking where that is.

    Attributes:
        rows: how many.
        query: (batch, heads, rows, head_dim), after RoPE; None before the first token.
        positions: (batch, rows) int64, -1 where there was none yet.
        scale, softcap: as for `kvtool.maths.attention.attention_weights`.
    """

    name = "query_window"

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.clear()

    def clear(self) -> None:
        self.query: Tensor | None = None
        self.positions: Tensor | None = None
        self.scale: float = 1.0
        self.softcap: float | None = None

    def by_kv_head(self, kv_heads: int) -> tuple[Tensor, Tensor]:
        """Return queries as (batch, kv_heads, group, rows, head_dim), and which there are."""
        if self.query is None or self.positions is None:
            raise RuntimeError("no prompt has been seen")
        return group_queries(self.query, kv_heads), self.positions >= 0

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
        if self.query is None or self.positions is None:
            raise RuntimeError("no prompt has been seen")
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

    def _keep(self, query: Tensor, positions: Tensor) -> None:
        """Keep copies of the newest of some rows, each at its place."""
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

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._keep(tensors["window.query"], tensors["window.positions"])

    @property
    def nbytes(self) -> int:
        held = (self.query, self.positions)
        return tensor_bytes([tensor for tensor in held if tensor is not None])


class LastQueries(Part):
    """The queries that a policy will look back from.

    Attributes:
        query: (batch, heads, rows, head_dim); None before the first block.
        positions: (batch or 1, rows) of them, -1 = padding.
    """

    name = "last_queries"

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.query: Tensor | None = None
        self.positions: Tensor | None = None

    def keep(self, query: Tensor, positions: Tensor) -> None:
        """Keep these until the next block."""
        self.query, self.positions = query, positions

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.query is not None and self.positions is not None:
            batch = len(self.query)
            self.positions = change(self.positions.expand(batch, -1))
            self.query = change(self.query)


class Moments(Part):
    """Count, mean and scatter of a layer's queries before RoPE, of each row and query head.

    Attributes:
        asked: what of them the policy wants.
        rotation: how the layer turns its queries; None: it does not.
        state: `count` (batch, heads), `mean` (batch, heads, head_dim) and, where it is wanted,
            `scatter` (batch, heads, head_dim, head_dim), all float32; empty before the first block.
    """

    name = "moments"

    def __init__(self, asked: MomentsAsked, rotation: Rotation | None) -> None:
        self.asked, self.rotation = asked, rotation
        self._scale: float = 1.0
        self.clear()

    def clear(self) -> None:
        self.state: State = {}

    def set_scale(self, scale: float) -> None:
        """Say how the running attention scales its logits."""
        self._scale = scale

    def add(self, query: Tensor, valid: Tensor) -> None:
        """Take in queries.

        Args:
            query: (batch, heads, tokens, head_dim) float32, before RoPE.
            valid: bool (batch or 1, tokens), which of them count.
        """
        batch, heads, _, dim = query.shape
        if not self.state:
            self.state = {"count": query.new_zeros(batch, heads)}
            self.state["mean"] = query.new_zeros(batch, heads, dim)
            if self.asked.covariance:
                self.state["scatter"] = query.new_zeros(batch, heads, dim, dim)
        scatter = self.state.get("scatter")
        sums = add_moments(self.state["count"], self.state["mean"], scatter, query, valid)
        names = ("count", "mean", "scatter")
        self.state = {k: t for k, t in zip(names, sums, strict=True) if t is not None}

    def show(self) -> QueryMoments:
        """Return them as a score sees them."""
        if not self.state:
            raise RuntimeError("no block has been attended")
        covariance = None
        if self.asked.covariance:
            covariance = self.state["scatter"] / self.state["count"].clamp(min=1)[..., None, None]
        return QueryMoments(self.state["mean"], covariance, self._scale, self.rotation)

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        self.state = {name: change(number) for name, number in self.state.items()}

    def tensors(self) -> dict[str, Tensor]:
        return {f"moments.{name}": number for name, number in self.state.items()}

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        names = ("count", "mean", "scatter") if self.asked.covariance else ("count", "mean")
        self.state = {name: tensors[f"moments.{name}"] for name in names}

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.state.values())
