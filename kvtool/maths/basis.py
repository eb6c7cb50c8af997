"""Principal components of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def moments(keys: Tensor) -> Tensor:
    """Average over the tokens: k k^T, and in one more row k.

    Args:
        keys: (..., tokens, head_dim); of no tokens the averages are 0.

    Returns:
        (..., head_dim + 1, head_dim) float32.
    """
    import torch

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
    import torch

    products, mean = moments[..., :-1, :], moments[..., -1, :]
    covariance = products - mean[..., :, None] * mean[..., None, :]
    variances, directions = torch.linalg.eigh(covariance)
    return variances.flip(-1), directions.flip(-1)
