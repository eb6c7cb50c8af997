"""Upper and lower bounds of the keys of a page, kept up to date in place as tokens join.

Page p holds the tokens p * page .. (p + 1) * page - 1, the last one perhaps fewer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.maths.channels import put_column

if TYPE_CHECKING:
    from torch import Tensor


def page_bounds(keys: Tensor, page: int) -> Tensor:
    """Find the largest and the smallest number among the keys of each page, channel by channel.

    Args:
        keys: (batch, kv_heads, tokens, head_dim), at least one token.
        page: tokens of a page.

    Returns:
        (batch, kv_heads, 2 * head_dim, pages) in the keys' dtype, contiguous: `head_dim` rows of
        upper bounds, then as many of lower bounds.
    """
    import torch

    whole = keys.shape[2] // page
    full = keys[:, :, : whole * page].unflatten(2, (whole, page))
    upper, lower = [full.amax(3)], [full.amin(3)]
    if whole * page < keys.shape[2]:
        rest = keys[:, :, whole * page :]
        upper.append(rest.amax(2, keepdim=True))
        lower.append(rest.amin(2, keepdim=True))
    bounds = torch.cat([torch.cat(upper, 2), torch.cat(lower, 2)], 3)
    return bounds.transpose(2, 3).contiguous()


def widen_page(bounds: Tensor, key: Tensor, at: int, page: int) -> None:
    """Let token number `at` join its page, in place.

    Args:
        bounds: as of `page_bounds`, with a column for the page.
        key: (batch, kv_heads, head_dim).
    """
    import torch

    column = bounds[..., at // page]
    upper, lower = column.chunk(2, -1)
    if at % page == 0:
        upper.copy_(key)
        lower.copy_(key)
    else:
        upper.copy_(torch.maximum(upper, key))
        lower.copy_(torch.minimum(lower, key))


def widen_pages(bounds: Tensor, key: Tensor, at: Tensor, page: Tensor) -> None:
    """Let a token of each sequence join its page, in place; their lengths and pages differ.

    Args:
        bounds: as of `page_bounds`, with a column for the page of each sequence.
        key: (batch, kv_heads, head_dim).
        at: (batch, 1, 1) int64, the number of each sequence's token.
        page: (batch, 1, 1) int64, tokens of a page.
    """
    import torch

    column = (at // page)[..., None].expand(*bounds.shape[:3], 1)
    upper, lower = bounds.gather(3, column)[..., 0].chunk(2, -1)
    bound = torch.cat([torch.maximum(upper, key), torch.minimum(lower, key)], -1)
    bound = torch.where(at % page == 0, torch.cat([key, key], -1), bound)
    put_column(bounds, bound, at // page)


def pages_of(tokens: int, page: int) -> int:
    """Count the pages that `tokens` tokens fill, the last one perhaps not whole.

    >>> pages_of(7, 3), pages_of(6, 3)
    (3, 2)
    """
    return -(-tokens // page)
