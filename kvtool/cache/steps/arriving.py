"""Tokens of a running forward, and how unexpected the model's logits say that they were."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.maths.surprisal import surprisals
from kvtool.policies.numbers import Count


@dataclass(frozen=True)
class Arriving:
    """Tokens of the running forward.

    Attributes:
        tokens: (batch, q_len) int64.
        valid: (batch, q_len), False = padding; None: no padding.
        begun: (batch,) whether anything of the row was read before; None: the same for all rows.
        slot: (batch, 1) that a decoded token takes; None where tokens are appended.
    """

    tokens: Tensor
    valid: Tensor | None
    begun: Tensor | None
    slot: Tensor | None = None

    @property
    def count(self) -> Count:
        """New tokens of each row."""
        return self.tokens.shape[1] if self.valid is None else self.valid.sum(1)[:, None, None]


def read_surprisals(new: Arriving, logits: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
    """Read from logits how unexpected new tokens were.

    Args:
        logits: (batch, q_len, vocab) of the forward.
        known: (batch, vocab) logits after the tokens before; None: there are none.

    Returns:
        The surprisal of each token, (batch, q_len) float32, and the logits after the last one.
    """
    tokens = new.tokens.to(logits.device)
    valid = None if new.valid is None else new.valid.to(logits.device)
    columns = torch.arange(tokens.shape[1], device=logits.device).expand_as(tokens)
    last = columns if valid is None else torch.where(valid, columns, -1).cummax(1).values
    before = functional.pad(last[:, :-1], (1, 0), value=-1)  # the token before, -1: none here
    if tokens.shape[1] == 1 and known is not None:
        scores = surprisals(known[:, None], tokens, columns)
    else:
        scores = surprisals(logits, tokens, before.clamp(min=0))
        highest = scores.masked_fill(before < 0, 0).amax(1, keepdim=True)
        opening = highest
        if known is not None:
            opening = surprisals(known[:, None], tokens, torch.zeros_like(tokens))
            if new.begun is not None:
                begun = new.begun[:, None].to(logits.device)
                opening = torch.where(begun, opening, highest)
        scores = torch.where(before < 0, opening, scores)
    return scores, _last(logits, valid, last, known)


def _last(logits: Tensor, valid: Tensor | None, last: Tensor, known: Tensor | None) -> Tensor:
    """Copy the logits after the last token of each row: (batch, vocab)."""
    if valid is None:
        return logits[:, -1].clone()
    rows = torch.arange(logits.shape[0], device=logits.device)
    found = logits[rows, last[:, -1].clamp(min=0)]
    if known is None:
        return found
    return torch.where((last[:, -1] >= 0)[:, None], found, known)
