"""Values refitted by ridge regression, so that fewer of them give the output of all.

A change of the kept values is sought that makes up for an error of the attention output: with the
weights A of some queries on the kept tokens and the error E of their outputs, it is
(A^T A + p I)^-1 A^T E = A^T (A A^T + p I)^-1 E, and the smaller of both systems is solved.
"""

from __future__ import annotations

import torch
from torch import Tensor


def value_change(weights: Tensor, missing: Tensor, kept: Tensor, ridge: float) -> Tensor:
    """Compute the change of the kept values.

    The system is made and solved in float64: its smallest eigenvalue is ridge / kept of their sum,
    which float32 cannot distinguish from rounding once thousands are kept.

    Args:
        weights: (.., rows, slots) float32, 0 in empty slots and in rows of no query.
        missing: (.., rows, dim) what the outputs of these rows lack.
        kept: (..) how many slots are not empty.
        ridge: the penalty as a share of the mean of the diagonal of A^T A over the kept slots.

    Returns:
        (.., slots, dim) float64; 0 where no row has a weight.
    """
    weights, missing = weights.double(), missing.double()
    rows, slots = weights.shape[-2:]
    total = weights.square().sum((-2, -1))
    penalty = torch.where(total > 0, ridge * total / kept.clamp(min=1), 1.0)[..., None, None]
    across = weights.transpose(-1, -2)
    if rows <= slots:
        return across @ _solve(weights @ across, penalty, missing)
    return _solve(across @ weights, penalty, across @ missing)


def _solve(products: Tensor, penalty: Tensor, right: Tensor) -> Tensor:
    """Solve (products + penalty I) X = right by Cholesky; NaN comes back as NaN, without a sync."""
    identity = torch.eye(products.shape[-1], dtype=products.dtype, device=products.device)
    factor, _ = torch.linalg.cholesky_ex(products + penalty * identity)
    return torch.cholesky_solve(right, factor)
