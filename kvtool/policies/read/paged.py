"""The base of readers by pages: bounds of the keys of each page, updated in place."""

from __future__ import annotations

from collections.abc import Mapping

from kvtool.lazy_torch import Tensor
from kvtool.maths.estimates import page_bounds, pages_of, widen_page, widen_pages
from kvtool.policies.numbers import HeadSizes, State
from kvtool.policies.read.rows import PerRow, RowsRead, last_of
from kvtool.policies.read.view import Stored, fixed


class Paged(RowsRead):
    """A reader whose table is the smallest and largest key of each page.

    Attributes:
        page: tokens per page; None until the sizes are fixed.
    """

    page: int | None

    @property
    def page_size(self) -> int:
        """Return the tokens per page, once they are fixed."""
        return fixed(self.page)

    def counted_table(self, layer: HeadSizes, tokens: int) -> int:
        """Count the bytes of the bounds of one sequence, without making them."""
        bounds = 2 * layer.key_dim * pages_of(tokens, self.page_size)
        return layer.kv_heads * bounds * layer.itemsize

    def start(self, stored: Stored) -> State:
        return {"bounds": page_bounds(stored.keys, self.page_size)}

    def columns(self, tokens: int) -> Mapping[str, int]:
        return {"bounds": pages_of(tokens, self.page_size)}

    def append(self, tables: State, key: Tensor, value: Tensor, at: int) -> None:
        widen_page(tables["bounds"], key, at, self.page_size)

    def append_rows(
        self, tables: State, key: Tensor, value: Tensor, tokens: PerRow, sizes: Mapping[str, PerRow]
    ) -> None:
        at, page = last_of(tokens), sizes["page"].tensor
        column, first = tokens.once("page", lambda: (at // page, at % page == 0))
        widen_pages(tables["bounds"], key, column, first)


def pages_of_rows(tokens: PerRow, page: PerRow) -> PerRow:
    """Count the pages that each sequence's tokens fill, the last one perhaps not whole."""
    return tokens.map(pages_of, lambda count, size: (count + size - 1) // size, page)
