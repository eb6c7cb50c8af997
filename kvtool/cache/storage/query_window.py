"""The newest queries of a layer, for a policy that looks back from them whenever it cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kvtool.cache.storage.part import Part, tensor_bytes
from kvtool.maths.selection import take


class QueryWindow(Part):
    """The queries of the newest tokens of each batch entry, prompt or decoded.

    Attributes:
        rows: how many.
        query: (batch, heads, rows, head_dim), after RoPE, in no order; None before the first token.
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
        self._oldest = 0  # the row that the next token is written over

    @torch.no_grad()
    def see(self, query: Tensor, positions: Tensor, scale: float, softcap: float | None) -> None:
        """Take new queries, and keep the newest of all.

        Args:
            query: (batch, heads, q_len, head_dim).
            positions: (batch or 1, q_len) of them, -1 = padding.
        """
        self.scale, self.softcap = scale, softcap
        query, positions = self._newest(query, positions.expand(len(query), -1))
        if self.query is None or self.positions is None:
            batch, heads, _, dim = query.shape
            before = query.new_zeros(batch, heads, self.rows, dim)
            unknown = positions.new_full((batch, self.rows), -1)
        else:
            before, unknown = self._in_order(self.query, self.positions)
        both = torch.cat([before, query], 2), torch.cat([unknown, positions], 1)
        with torch.inference_mode(False):  # what is made inside it could not be written outside
            self.query, self.positions = (each.clone() for each in self._newest(*both))
        self._oldest = 0

    @torch.no_grad()
    def see_token(
        self, query: Tensor, position: int | Tensor, scale: float, softcap: float | None
    ) -> None:
        """Take the query of a decoded token of every batch entry.

        Args:
            query: (batch, heads, 1, head_dim).
            position: one number, or (batch, 1).
        """
        if self.query is None or self.positions is None:
            raise RuntimeError("no prompt has been seen")
        self.scale, self.softcap = scale, softcap
        self.query[:, :, self._oldest] = query[:, :, 0]
        own = slice(self._oldest, self._oldest + 1)
        self.positions[:, own] = position
        self._oldest = own.stop % self.rows

    @staticmethod
    def _in_order(query: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        order = positions.argsort(1)
        index = order[:, None].expand(-1, query.shape[1], -1)
        return take(query, index), positions.gather(1, order)

    def _newest(self, query: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the last rows that are no padding; what is missing stands in front."""
        place = torch.arange(positions.shape[1], device=positions.device)
        order = torch.where(positions >= 0, place, -1).argsort(stable=True, dim=1)
        newest = order[:, -self.rows :]
        index = newest[:, None].expand(-1, query.shape[1], -1)
        return take(query, index), positions.gather(1, newest)

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.query is not None and self.positions is not None:
            self.query, self.positions = change(self.query), change(self.positions)

    def tensors(self) -> dict[str, Tensor]:
        if self.query is None or self.positions is None:
            return {}
        query, positions = self._in_order(self.query, self.positions)
        return {"window.query": query, "window.positions": positions}

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.query, self.positions = tensors["window.query"], tensors["window.positions"]

    @property
    def nbytes(self) -> int:
        held = (self.query, self.positions)
        return tensor_bytes([tensor for tensor in held if tensor is not None])
