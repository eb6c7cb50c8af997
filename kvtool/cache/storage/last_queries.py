"""The last queries of a prompt that comes in blocks and is cut once, at its end."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvtool.cache.storage.part import Part


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
