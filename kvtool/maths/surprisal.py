"""Surprisal: how unexpected a token was to the model, -log p in nats."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


_COLUMNS = 64  # logits that are turned into float32 at a time


def surprisals(logits: Tensor, tokens: Tensor, at: Tensor) -> Tensor:
    """Compute -log p of each token, by the logits of one column.

    Args:
        logits: (batch, columns, vocab), any float dtype.
        tokens: (batch, n) int64.
        at: (batch, n) int64, the column whose logits predict the token.

    Returns:
        (batch, n) float32, 0 or more.
    """
    import torch

    parts = logits.split(_COLUMNS, 1)
    normaliser = torch.cat([part.float().logsumexp(-1) for part in parts], 1)
    rows = torch.arange(logits.shape[0], device=logits.device)[:, None]
    chosen = logits[rows, at, tokens].float()
    return (normaliser.gather(1, at) - chosen).clamp_(min=0)
