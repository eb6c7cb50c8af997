"""Kernels over the tables of readers, each of which `kvtool.kernels.tables` explains.

The bounds of whole pages by one query read the table once and sum the group first. Products with
chosen rows of a table read these where they lie instead of copying them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtool.kernels.tiles import of_head, strided, width

_PAGES, _CHANNELS = 64, 32  # of a tile


@triton.jit(do_not_specialize=["pages"])
def page_scores_kernel(
    query,
    bounds,
    scores,
    heads,
    group,
    pages,
    DIM: tl.constexpr,
    PAGES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Score a tile of pages of one head."""
    own = (tl.program_id(0) % heads).to(tl.int64)
    batch = (tl.program_id(0) // heads).to(tl.int64)
    page = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    there = page < pages
    own_query, table = of_head(query, batch, own), of_head(bounds, batch, own)
    score = tl.zeros((PAGES,), tl.float32)
    for first in range(0, DIM, CHANNELS):
        channel = first + tl.arange(0, CHANNELS)
        real = channel < DIM
        above = tl.zeros((CHANNELS,), tl.float32)
        below = tl.zeros((CHANNELS,), tl.float32)
        for member in range(group):
            number = tl.load(own_query + member * query[3] + channel, mask=real, other=0.0)
            number = number.to(tl.float32)
            above += tl.maximum(number, 0.0)
            below += tl.minimum(number, 0.0)
        row = channel.to(tl.int64)[:, None]
        inside = real[:, None] & there[None, :]
        upper = tl.load(table + row * bounds[3] + page[None, :], mask=inside, other=0.0)
        lower = tl.load(table + (row + DIM) * bounds[3] + page[None, :], mask=inside, other=0.0)
        upper, lower = upper.to(tl.float32), lower.to(tl.float32)
        score += tl.sum(above[:, None] * upper + below[:, None] * lower, 0)
    tl.store(scores + tl.program_id(0).to(tl.int64) * pages + page, score, mask=there)


def page_scores(query: Tensor, bounds: Tensor, pages: int) -> Tensor:
    """Score pages as `kvtool.kernels.tables.page_scores` does."""
    batch, heads, group, dim = query.shape
    scores = torch.empty((batch, heads, pages), dtype=torch.float32, device=query.device)
    with torch.cuda.device_of(query):
        page_scores_kernel[(batch * heads, triton.cdiv(pages, _PAGES))](
            strided(query),
            strided(bounds),
            scores,
            heads,
            group,
            pages,
            DIM=dim,
            PAGES=_PAGES,
            CHANNELS=_CHANNELS,
        )
    return scores


_COLUMNS, _ROWS = 64, 16  # of a tile


@triton.jit(do_not_specialize=["columns"])
def row_product_kernel(
    part,
    table,
    rows,
    out,
    heads,
    group,
    taken,
    columns,
    GROUP_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Multiply with a tile of columns of one head, for all members of its group."""
    own = (tl.program_id(0) % heads).to(tl.int64)
    batch = (tl.program_id(0) // heads).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    member = tl.arange(0, GROUP_WIDTH)
    own_part, own_table = of_head(part, batch, own), of_head(table, batch, own)
    total = tl.zeros((GROUP_WIDTH, COLUMNS), tl.float32)
    for first in range(0, taken, ROWS):
        place = first + tl.arange(0, ROWS)
        real = place < taken
        row = tl.load(of_head(rows, batch, own) + place, mask=real, other=0).to(tl.int64)
        numbers = tl.load(
            own_part + member[:, None] * part[3] + place[None, :],
            mask=(member < group)[:, None] & real[None, :],
            other=0.0,
        )
        tile = tl.load(
            own_table + row[:, None] * table[3] + column[None, :],
            mask=real[:, None] & there[None, :],
            other=0.0,
        )
        total += tl.dot(numbers, tile, input_precision="ieee")
    line = tl.program_id(0).to(tl.int64) * group + member
    tl.store(
        out + line[:, None] * columns + column[None, :],
        total,
        mask=(member < group)[:, None] & there[None, :],
    )


def row_product(part: Tensor, table: Tensor, rows: Tensor, columns: int) -> Tensor:
    """Multiply with rows as `kvtool.kernels.tables.row_product` does."""
    batch, heads, group, taken = part.shape
    out = torch.empty((batch, heads, group, columns), dtype=torch.float32, device=part.device)
    with torch.cuda.device_of(part):
        row_product_kernel[(batch * heads, triton.cdiv(columns, _COLUMNS))](
            *(strided(each) for each in (part, table, rows)),
            out,
            heads,
            group,
            taken,
            columns,
            GROUP_WIDTH=width(group),
            COLUMNS=_COLUMNS,
            ROWS=_ROWS,
        )
    return out
