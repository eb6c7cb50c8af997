"""CriticalKV: part of the budget by the score, the rest by what values become behind the attention.

Feng et al., 2025, https://arxiv.org/abs/2502.03805, algorithm 1. In each KV head with a budget of b
tokens, the best max(1, floor(first * b)) by the base's score are kept. The others are ranked by

    (score + epsilon) * mean over the group of |W_O^h v|_1

where W_O^h are the columns of the attention's output projection that belong to query head h.
Tokens that the base protects are the first of the best. Where heads have budgets of their own
(`+ada`, `kvzip`), these are split by the base's scores before.

Differences from the paper: none in the formula. It works where a prompt is cut, and with `+every`
at its cuts: at every decoded token, the projection of all values would be too dear. Scores have to
be 0 or more. Reports show the base's scores. With `--prefill block` both stages run at each cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.lazy_torch import Tensor, torch
from kvtool.maths.selection import top_mask
from kvtool.policies.parts import Count, Rescore, SlotView
from kvtool.policies.spelling import limited


def first_stage(budget: Count, first: float, slots: int) -> Count:
    """Count the tokens of each head that are kept by the score alone.

    >>> first_stage(4, 0.5, 6), first_stage(1, 0.5, 6), first_stage(100, 0.5, 6)
    (2, 1, 6)

    Args:
        budget: of each head.
        slots: there are no more.
    """
    if isinstance(budget, int):
        return min(max(int(first * budget), 1), slots)
    return (budget.double() * first).floor().long().clamp(1, slots)


@dataclass(frozen=True)
class Critical(Rescore):
    """Keep some tokens by the score, the others by what the output projection makes of values.

    Args:
        first: the part of each head's budget that goes to the tokens of highest score; 0 to 1.
        epsilon: what is added to the scores of the others before they are weighed; 0 or more.
    """

    first: float = limited(0.5, "between 0 and 1")
    epsilon: float = limited(1e-4, "0 or more")

    name: ClassVar = "critical"
    paper: ClassVar = "https://arxiv.org/abs/2502.03805"
    sees_projection: ClassVar = True
    at_cut: ClassVar = True

    def rescore(self, importance: Tensor, view: SlotView) -> Tensor:
        count = first_stage(view.budget, self.first, importance.shape[-1])
        best = top_mask(importance, view.positions, count) & (view.positions >= 0)
        layers = zip(view.projections, view.values, strict=True)
        lengths = [projection.lengths(values, 1).mean(2) for projection, values in layers]
        weighed = (importance + self.epsilon) * torch.cat(lengths)
        certain = best | (importance == float("inf"))
        return weighed.masked_fill(certain, float("inf"))
