"""PyramidKV: SnapKV in every layer, with budgets that fall from the first layer to the last.

Cai et al., 2024, https://arxiv.org/abs/2406.02069, section 4. The budget is the mean over the
layers, observation window included; see `kvtool.policies.allocate.pyramid` for the line and for
where its rounding differs from the authors' code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvtool.errors import UsageError
from kvtool.policies.allocate.pyramid import Pyramid
from kvtool.policies.evidence import AttentionRows
from kvtool.policies.numbers import Count, State
from kvtool.policies.parts import Evidence, Score, SlotView
from kvtool.policies.scores.shared import check_voting, pooled_votes, voting_window

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PyramidKV(Score):
    """SnapKV with more tokens for lower layers; the budget is the mean.

    Args:
        window: last queries of the prompt, which vote and are kept themselves.
        kernel: odd width of the pooling, in tokens; 1 = none.
        pool: `max` or `avg`.
        beta: how steep: the last layer has 1/beta of the mean beside the window.
    """

    window: int = 8
    kernel: int = 7
    pool: Literal["max", "avg"] = "max"
    beta: float = 20.0

    name: ClassVar = "pyramidkv"
    paper: ClassVar = "https://arxiv.org/abs/2406.02069"
    evidence: ClassVar = Evidence.LAST_ROWS
    when: ClassVar = "prompt"
    attention: ClassVar = True

    def __post_init__(self) -> None:
        check_voting(self)
        if self.beta < 1:
            raise UsageError(f"pyramidkv: beta must be 1 or more, got {self.beta}")

    @property
    def allocator(self) -> Pyramid:
        return Pyramid(beta=self.beta)

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        return pooled_votes(self, view, rows)

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor:
        return voting_window(self, view)

    def reserved(self, budget: int) -> Mapping[str, int]:
        return {"window": self.window}
