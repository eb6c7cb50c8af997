"""SnapKV: the last queries of the prompt vote, and their votes spread to neighbours.

Li et al., 2024, https://arxiv.org/abs/2404.14469, section 4.

Differences from the authors' code: keys are kept per KV head (they repeat them to every query head,
which costs the group's size in memory), the votes of a group are summed before the pooling, and
survivors stay in order. In a prompt run in blocks the last queries of each block vote, as CAOTE
does it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.errors import UsageError
from kvtool.policies.numbers import Count, State, minimum
from kvtool.policies.parts import Evidence, Rows, Score, SlotView


def pool_votes(
    votes: Tensor, positions: Tensor, window: Tensor, *, kernel: int, pool: str
) -> Tensor:
    """Smooth votes over neighbouring tokens, leaving the observation window out.

    Average pooling divides by `kernel` at the borders too, as the authors' code does.

    Args:
        votes: (batch, kv_heads, slots) float32.
        positions: (batch, kv_heads, slots), -1 = empty; neighbours are neighbours by position.
        window: bool (batch, kv_heads, slots), the observation window, the last tokens.
        kernel: odd width, in tokens.
        pool: `max` or `avg`.

    Returns:
        (batch, kv_heads, slots); inside the window the votes as they came.
    """
    kernel = min(kernel, 2 * votes.shape[-1] - 1)  # a wider one sees no more, and takes long
    last = torch.iinfo(positions.dtype).max
    order = positions.masked_fill(positions < 0, last).argsort(-1)
    outside = float("-inf") if pool == "max" else 0.0
    past = votes.masked_fill(window | (positions < 0), outside).gather(-1, order)
    if pool == "max":
        pooled = functional.max_pool1d(past, kernel, stride=1, padding=kernel // 2)
    else:
        pooled = functional.avg_pool1d(past, kernel, stride=1, padding=kernel // 2)
    pooled = torch.empty_like(pooled).scatter_(-1, order, pooled)
    return torch.where(window, votes, pooled)


@dataclass(frozen=True)
class SnapKV(Score):
    """Keep the prompt tokens that the last queries attend to, with their neighbours; then append.

    Args:
        window: last queries of the prompt, which vote and are kept themselves.
        kernel: odd width of the pooling, in tokens; 1 = none.
        pool: `max` or `avg`.
    """

    window: int = 32
    kernel: int = 7
    pool: Literal["max", "avg"] = "max"

    name: ClassVar = "snapkv"
    paper: ClassVar = "https://arxiv.org/abs/2404.14469"
    evidence: ClassVar = Evidence.LAST_ROWS
    when: ClassVar = "prompt"
    attention: ClassVar = True

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UsageError(f"{self.name}: window must be 1 or more, got {self.window}")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise UsageError(f"{self.name}: kernel must be odd and 1 or more, got {self.kernel}")

    def importance(self, state: State, view: SlotView, rows: Rows | None) -> Tensor:
        group = rows.weights.shape[2]
        votes = rows.weights.sum((2, 3)) / group
        return pool_votes(
            votes, view.positions, self._window(view), kernel=self.kernel, pool=self.pool
        )

    def protected(self, state: State, view: SlotView, victims: Count) -> Tensor:
        return self._window(view)

    def reserved(self, budget: int) -> Mapping[str, int]:
        return {"window": self.window}

    def _window(self, view: SlotView) -> Tensor:
        return view.recent(minimum(self.window, view.block))
