"""Bounds of whole pages by one query: the table is read once, and the group is summed first."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtool.kernels.tiles import dense

_PAGES, _CHANNELS = 64, 32  # of a tile


@triton.jit(do_not_specialize=["pages"])
def page_scores_kernel(
    query,
    bounds,
    scores,
    query_batch,
    query_head,
    query_member,
    bounds_batch,
    bounds_head,
    bounds_row,
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
    query += batch * query_batch + own * query_head
    bounds += batch * bounds_batch + own * bounds_head
    score = tl.zeros((PAGES,), tl.float32)
    for first in range(0, DIM, CHANNELS):
        channel = first + tl.arange(0, CHANNELS)
        real = channel < DIM
        above = tl.zeros((CHANNELS,), tl.float32)
        below = tl.zeros((CHANNELS,), tl.float32)
        for member in range(group):
            number = tl.load(query + member * query_member + channel, mask=real, other=0.0)
            number = number.to(tl.float32)
            above += tl.maximum(number, 0.0)
            below += tl.minimum(number, 0.0)
        row = channel.to(tl.int64)[:, None]
        inside = real[:, None] & there[None, :]
        upper = tl.load(bounds + row * bounds_row + page[None, :], mask=inside, other=0.0)
        lower = tl.load(bounds + (row + DIM) * bounds_row + page[None, :], mask=inside, other=0.0)
        upper, lower = upper.to(tl.float32), lower.to(tl.float32)
        score += tl.sum(above[:, None] * upper + below[:, None] * lower, 0)
    tl.store(scores + tl.program_id(0).to(tl.int64) * pages + page, score, mask=there)


def page_scores(query: Tensor, bounds: Tensor, pages: int) -> Tensor:
    """Score pages as `kvtool.kernels.tables.page_scores` does."""
    query, bounds = dense(query), dense(bounds)
    batch, heads, group, dim = query.shape
    scores = torch.empty((batch, heads, pages), dtype=torch.float32, device=query.device)
    with torch.cuda.device_of(query):
        page_scores_kernel[(batch * heads, triton.cdiv(pages, _PAGES))](
            query,
            bounds,
            scores,
            *query.stride()[:3],
            *bounds.stride()[:3],
            heads,
            group,
            pages,
            DIM=dim,
            PAGES=_PAGES,
            CHANNELS=_CHANNELS,
        )
    return scores
