"""Mean and scatter of vectors that come in parts, none of which is kept.

Chan, Golub & LeVeque, 1979, "Updating formulae and a pairwise algorithm for computing sample
variances". Each part is centred on its own mean before it is multiplied out, so that nothing
cancels, however far the mean is from 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def add_moments(
    count: Tensor, mean: Tensor, scatter: Tensor | None, vectors: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Add vectors to their number, their mean and the sum of their centred outer products.

    Args:
        count: (batch, heads) float32.
        mean: (batch, heads, dim) float32; 0 where nothing has been counted.
        scatter: (batch, heads, dim, dim) float32; None: nobody wants it.
        vectors: (batch, heads, tokens, dim) float32.
        valid: bool (batch or 1, tokens), which of them count.

    Returns:
        The three of all vectors so far.
    """
    others = ~valid[:, None, :, None]
    new = valid.sum(-1, keepdim=True).float()
    own = vectors.masked_fill(others, 0).sum(2) / new.clamp(min=1)[..., None]
    total = count + new
    share, step = new / total.clamp(min=1), own - mean
    if scatter is not None:
        centred = (vectors - own[:, :, None]).masked_fill(others, 0)
        scatter = scatter + centred.transpose(2, 3) @ centred
        between = step[..., None] * step[..., None, :]
        scatter = scatter + between * (count * share)[..., None, None]
    return total, mean + step * share[..., None], scatter
