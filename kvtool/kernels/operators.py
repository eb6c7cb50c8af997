"""Kernels of readers as operators of torch, which torch.compile takes as they are."""

from typing import Any

import torch
from torch import Tensor

from kvtool.kernels import attend_slots, read_tables

_HOW: Any = {"mutates_args": (), "tags": (torch.Tag.flexible_layout,)}  # strides as they come
page_scores: Any = torch.library.custom_op("kvtool::page_scores", read_tables.page_scores, **_HOW)
row_product: Any = torch.library.custom_op("kvtool::row_product", read_tables.row_product, **_HOW)


@page_scores.register_fake
def _(query, bounds, pages):
    return query.new_empty((*query.shape[:2], pages), dtype=torch.float32)


@row_product.register_fake
def _(part, table, rows, columns):
    return part.new_empty((*part.shape[:3], columns), dtype=torch.float32)


@torch.library.custom_op("kvtool::attend_chosen", **_HOW)
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
def _(query, key, value, *_):
    return value.new_empty((*query.shape[:3], value.shape[-1]))
