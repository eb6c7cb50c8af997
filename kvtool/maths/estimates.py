"""Estimates of logits, for readers: channels, bounds of pages, principal components of keys."""

from __future__ import annotations

from kvtool.lazy_torch import Tensor, torch
from kvtool.maths.selection import top_slots

_TINY = 1e-30  # keeps a query of zeros from dividing by zero


def heaviest_channels(query: Tensor, count: int) -> Tensor:
    """Find the `count` channels of largest magnitude, summed over the query heads of a group.

    Args:
        query: (batch, kv_heads, group, head_dim).

    Returns:
        (batch, kv_heads, count) int64.
    """
    return top_slots(query.float().abs().sum(2), count)


def take_channels(query: Tensor, channels: Tensor) -> Tensor:
    """Take some channels of a query: (batch, kv_heads, group, count)."""
    return query.gather(3, channels[:, :, None].expand(-1, -1, query.shape[2], -1))


def partial_scale(query: Tensor, part: Tensor, scale: float) -> Tensor:
    """Compute the factor that makes a logit of a dot product over the heaviest channels alone.

    SparQ (https://arxiv.org/abs/2312.04985): the temperature sqrt(D |q'| / |q|), with the 1-norms
    of the channels taken and of all, in place of sqrt(D).

    Args:
        query: (batch, kv_heads, group, head_dim).
        part: (batch, kv_heads, group, count), the channels taken.
        scale: the factor of whole logits, D ** -0.5 in most models.

    Returns:
        (batch, kv_heads, group, 1) float32.
    """
    norm = torch.linalg.vector_norm(part.float(), 1, -1, keepdim=True)
    whole = torch.linalg.vector_norm(query.float(), 1, -1, keepdim=True)
    return scale * torch.sqrt(whole.clamp(min=_TINY) / norm.clamp(min=_TINY))


def take_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Copy rows of a table, each as a whole.

    Args:
        table: (batch, kv_heads, all, width), contiguous.
        rows: (batch, kv_heads, count) int64, or (batch, kv_heads, group, count).

    Returns:
        (batch, kv_heads, count, width), or (batch, kv_heads, group, count, width).
    """
    batch, heads, height, width = table.shape
    first = torch.arange(0, batch * heads * height, height, device=table.device)
    first = first.view(batch, heads, *[1] * (rows.dim() - 2))
    flat = table.view(-1, width).index_select(0, (rows + first).flatten())
    return flat.view(*rows.shape, width)


def put_column(table: Tensor, column: Tensor, at: Tensor) -> None:
    """Write a column of each sequence's table, in place; a compiler copies no table for it.

    One for all sequences is one operator.

    Args:
        table: (batch, kv_heads, rows, columns).
        column: (batch, kv_heads, rows).
        at: (batch or 1, 1, 1) int64, which column.
    """
    if len(at) == 1:
        table.index_copy_(3, at.flatten(), column[..., None])
        return
    if not torch.compiler.is_compiling():
        table.scatter_(3, at[..., None].expand(*column.shape, 1), column[..., None])
        return
    entry, head, row = (torch.arange(n, device=table.device) for n in column.shape)
    table.index_put_((entry[:, None, None], head[:, None], row, at), column)


def page_bounds(keys: Tensor, page: int) -> Tensor:
    """Find the largest and the smallest number among the keys of each page, channel by channel.

    Args:
        keys: (batch, kv_heads, tokens, head_dim), at least one token.
        page: tokens of a page.

    Returns:
        (batch, kv_heads, 2 * head_dim, pages) in the keys' dtype, contiguous: `head_dim` rows of
        upper bounds, then as many of lower bounds.
    """
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
    column = bounds[..., at // page]
    upper, lower = column.chunk(2, -1)
    if at % page == 0:
        upper.copy_(key)
        lower.copy_(key)
    else:
        upper.copy_(torch.maximum(upper, key))
        lower.copy_(torch.minimum(lower, key))


def widen_pages(bounds: Tensor, key: Tensor, column: Tensor, first: Tensor) -> None:
    """Let a token of each sequence join its page, in place; their lengths and pages differ.

    Args:
        bounds: as of `page_bounds`, with a column for the page of each sequence.
        key: (batch, kv_heads, head_dim).
        column: (batch or 1, 1, 1) int64, the number of each page.
        first: bool (batch or 1, 1, 1), whether the token is the page's first.
    """
    if len(column) == 1:
        found = bounds.index_select(3, column.flatten())
    else:
        found = bounds.gather(3, column[..., None].expand(*bounds.shape[:3], 1))
    upper, lower = found[..., 0].chunk(2, -1)
    wider = torch.stack([torch.maximum(upper, key), torch.minimum(lower, key)], 2)
    wider = torch.where(first[..., None], key[:, :, None], wider)
    put_column(bounds, wider.flatten(2), column)


def pages_of(tokens: int, page: int) -> int:
    """Count the pages that `tokens` tokens fill, the last one perhaps not whole.

    >>> pages_of(7, 3), pages_of(6, 3)
    (3, 2)
    """
    return -(-tokens // page)


def moments(keys: Tensor) -> Tensor:
    """Average over the tokens: k k^T, and in one more row k.

    Args:
        keys: (..., tokens, head_dim); of no tokens the averages are 0.

    Returns:
        (..., head_dim + 1, head_dim) float32.
    """
    keys, tokens = keys.float(), max(1, keys.shape[-2])
    sums = [torch.matmul(keys.transpose(-1, -2), keys), keys.sum(-2, keepdim=True)]
    return torch.cat(sums, -2) / tokens


def principal_components(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Find the directions in which keys vary, the strongest first.

    Args:
        moments: (..., head_dim + 1, head_dim), as of `moments`; means of several texts' are those
            of all their keys.

    Returns:
        Variances, (..., head_dim), and the directions, (..., head_dim, head_dim), orthonormal, a
        direction a column.
    """
    products, mean = moments[..., :-1, :], moments[..., -1, :]
    covariance = products - mean[..., :, None] * mean[..., None, :]
    variances, directions = torch.linalg.eigh(covariance)
    return variances.flip(-1), directions.flip(-1)
