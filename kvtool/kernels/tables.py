"""Compute over the tables of readers: by a kernel where one can run, else in plain torch."""

from __future__ import annotations

from typing import Any

from kvtool.lazy_torch import Tensor, torch


def page_scores(query: Tensor, bounds: Tensor, pages: int) -> Tensor:
    """Bound the dot products with the keys of each page from above, summed over a group.

    The bound of a page is sum_d max(q_d upper_d, q_d lower_d): the upper bound counts where the
    query is positive, the lower one where it is negative.

    Args:
        query: (batch, kv_heads, group, head_dim).
        bounds: (batch, kv_heads, 2 * head_dim, at least `pages`), of
            `kvtool.maths.estimates.page_bounds`.

    Returns:
        (batch, kv_heads, pages) float32.
    """
    return _module("PAGES", query).page_scores(query, bounds, pages)


def row_product(part: Tensor, table: Tensor, rows: Tensor, width: int) -> Tensor:
    """Multiply a few numbers of each query with as many rows of a table.

    Args:
        part: (batch, kv_heads, group, count).
        table: (batch, kv_heads, all, at least `width`), contiguous.
        rows: (batch, kv_heads, count) int64.

    Returns:
        (batch, kv_heads, group, width) float32.
    """
    return _module("PRODUCTS", part).row_product(part, table, rows, width)


def _module(family: str, query: Tensor) -> Any:
    """Return the kernels where they can run on a query, else plain torch."""
    from kvtool.kernels import reference, trust

    if not trust.usable(trust.Family[family], query, group=query.shape[2], operator=True):
        return reference
    if torch.compiler.is_compiling():
        from kvtool.kernels import operators

        return operators
    from kvtool.kernels import read_tables

    return read_tables
