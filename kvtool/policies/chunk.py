"""ChunkKV: a prompt is kept in runs of neighbouring tokens, not in single ones.

Liu et al., 2025, https://arxiv.org/abs/2502.00299. Tokens are cut into runs by position, token p
into run p // length; those that the base protects belong to none. A run's score is the mean of its
tokens' scores, summed over the KV heads of the layer, and all heads keep the same runs, the best
first. The last run is filled by its tokens' own scores, summed over the heads, so that budgets are
exact; ties go to the lower position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.lazy_torch import Tensor, torch
from kvtool.maths.selection import order_key
from kvtool.policies.parts import Select, SlotView
from kvtool.policies.spelling import limited


def run_order(scores: Tensor, positions: Tensor, free: Tensor, length: int) -> Tensor:
    """Say in which order tokens are kept if whole runs go first.

    >>> scores = torch.tensor([[0.1, 0.4, 0.2, 0.2, 0.05, 0.05, 0.3]])
    >>> places = torch.arange(7)[None]
    >>> run_order(scores, places, places >= 0, 3).tolist()
    [[3, 1, 2, 4, 5, 6, 0]]

    Args:
        scores: (batch, slots) float32.
        positions: (batch, slots), -1 = empty.
        free: bool (batch, slots), the tokens that belong to runs.

    Returns:
        (batch, slots) int64, 0 for the token that is kept first; others than the free ones last.
    """
    runs = _neighbours(positions, length)
    # in float64, since three times 0.1 in float32, divided by 3, isn't the 0.1 that it ties with
    share = torch.where(free, scores, 0.0).double()
    total = torch.zeros_like(share).scatter_add_(1, runs, share)
    count = torch.zeros_like(share).scatter_add_(1, runs, free.double())
    mean = torch.where(count > 0, total / count, float("-inf")).float()
    by_run = torch.zeros_like(runs).scatter_(1, _descending(mean), _counting(runs))
    rank = torch.where(free, by_run.gather(1, runs), positions.shape[1])
    best = order_key(scores, positions).argsort(1, descending=True)
    order = best.gather(1, rank.gather(1, best).argsort(stable=True, dim=1))
    return torch.zeros_like(order).scatter_(1, order, _counting(order))


def _neighbours(positions: Tensor, length: int) -> Tensor:
    """Number the runs that there are, (batch, slots) int64, in ascending position from 0 on."""
    place = positions.long()
    run, order = torch.where(place < 0, -1, place // length).sort(stable=True, dim=1)
    changes = torch.zeros_like(run)
    changes[:, 1:] = run[:, 1:] != run[:, :-1]
    return torch.zeros_like(run).scatter_(1, order, changes.cumsum(1))


def _descending(scores: Tensor) -> Tensor:
    return order_key(scores, _counting(scores)).argsort(1, descending=True)


def _counting(like: Tensor) -> Tensor:
    return torch.arange(like.shape[1], device=like.device).expand(like.shape)


@dataclass(frozen=True)
class Chunk(Select):
    """Keep runs of neighbouring tokens of a prompt, whole where the budget allows it (ChunkKV).

    Args:
        length: tokens of a run.
    """

    length: int = limited(20, "1 or more")

    name: ClassVar = "chunk"
    paper: ClassVar = "https://arxiv.org/abs/2502.00299"

    @property
    def min_budget(self) -> int:
        return self.length

    def order(self, importance: Tensor, view: SlotView, protected: Tensor | None) -> Tensor:
        summed = view.heads.all(importance, 0).sum(1)
        positions = view.positions[:, 0]  # all heads hold the same tokens
        free = positions >= 0
        if protected is not None:
            free = free & ~protected[:, 0].expand_as(free)
        return -run_order(summed, positions, free, self.length)[:, None].float()
