"""Kernels of readers as operators of torch, which torch.compile takes as they are."""

import torch
from torch import Tensor

from kvtool.kernels import attend_slots, read_tables

_FLEXIBLE = (torch.Tag.flexible_layout,)  # strides are those that come


@torch.library.custom_op("kvtool::page_scores", mutates_args=(), tags=_FLEXIBLE)
def page_scores(query: Tensor, bounds: Tensor, pages: int) -> Tensor:
    """Score pages as `kvtool.kernels.tables.page_scores` does."""
    return read_tables.page_scores(query, bounds, pages)


@page_scores.register_fake
def _(query: Tensor, bounds: Tensor, pages: int) -> Tensor:
    return query.new_empty((*query.shape[:2], pages), dtype=torch.float32)


@torch.library.custom_op("kvtool::row_product", mutates_args=(), tags=_FLEXIBLE)
def row_product(part: Tensor, table: Tensor, rows: Tensor, columns: int) -> Tensor:
    """Multiply with rows as `kvtool.kernels.tables.row_product` does."""
    return read_tables.row_product(part, table, rows, columns)


@row_product.register_fake
def _(part: Tensor, table: Tensor, rows: Tensor, columns: int) -> Tensor:
    return part.new_empty((*part.shape[:3], columns), dtype=torch.float32)


@torch.library.custom_op("kvtool::attend_chosen", mutates_args=(), tags=_FLEXIBLE)
def attend_chosen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Tensor | None,
    chosen: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attend to chosen slots as `kvtool.kernels.attend_slots.attend_slots` does."""
    attended = attend_slots.attend_slots(
        query, key, value, places, {}, scale=scale, softcap=softcap, sinks=sinks, chosen=chosen
    )
    return attended[0]


@attend_chosen.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Tensor | float | None) -> Tensor:
    return value.new_empty((*query.shape[:3], value.shape[-1]))
