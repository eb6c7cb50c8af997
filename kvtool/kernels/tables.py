"""Compute over the tables of readers: by a kernel where one can run, else in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def page_scores(query: Tensor, bounds: Tensor, pages: int) -> Tensor:
    """Bound the dot products with the keys of each page from above, summed over a group.

    The bound of a page is sum_d max(q_d upper_d, q_d lower_d): the upper bound counts where the
    query is positive, the lower one where it is negative.

    Args:
        query: (batch, kv_heads, group, head_dim).
        bounds: (batch, kv_heads, 2 * head_dim, at least `pages`), of
            `kvtool.maths.pages.page_bounds`.

    Returns:
        (batch, kv_heads, pages) float32.
    """
    from kvtool.kernels import reference, trust
    from kvtool.kernels.kind import Family

    if trust.usable(Family.PAGES, query, group=query.shape[2]):
        from kvtool.kernels import page_scores as kernel

        return kernel.page_scores(query, bounds, pages)
    return reference.page_scores(query, bounds, pages)


def row_product(part: Tensor, table: Tensor, rows: Tensor, width: int) -> Tensor:
    """Multiply a few numbers of each query with as many rows of a table.

    Args:
        part: (batch, kv_heads, group, count).
        table: (batch, kv_heads, all, at least `width`), contiguous.
        rows: (batch, kv_heads, count) int64.

    Returns:
        (batch, kv_heads, group, width) float32.
    """
    from kvtool.kernels import reference, trust
    from kvtool.kernels.kind import Family

    if trust.usable(Family.PRODUCTS, part, group=part.shape[2]):
        from kvtool.kernels import row_product as kernel

        return kernel.row_product(part, table, rows, width)
    return reference.row_product(part, table, rows, width)
