"""AdaKV: SnapKV whose KV heads compete for the budget of their layer.

Feng et al., 2024, https://arxiv.org/abs/2407.11550. Heads of wide attention keep more tokens than
heads that look at few; see `kvtool.policies.allocate.ada` for the split and for where its rounding
differs from the authors' code. A prompt in blocks is cut once, at its end, since heads compete by
their votes on the whole of it; with a plan that splits the budget, after every block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvtool.policies.allocate.ada import Ada
from kvtool.policies.evidence import AttentionRows
from kvtool.policies.numbers import Count, State
from kvtool.policies.parts import Evidence, Score, SlotView
from kvtool.policies.scores.shared import check_voting, pooled_votes, voting_window

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AdaKV(Score):
    """SnapKV whose heads compete for their layer's budget; the budget is the mean over heads.

    Args:
        window: last queries of the prompt, which vote and are kept themselves.
        kernel: odd width of the pooling, in tokens; 1 = none.
        pool: `max` or `avg`.
        share: part of the budget that every head has for sure.
        safeguard: `mix` moves the heads' counts towards the mean by the share, `force` lets every
            head keep its own best tokens first.
        normalise: weigh each head by how much of its score its best tokens hold.
    """

    window: int = 32
    kernel: int = 7
    pool: Literal["max", "avg"] = "max"
    share: float = 0.2
    safeguard: Literal["mix", "force"] = "mix"
    normalise: bool = False

    name: ClassVar = "adakv"
    paper: ClassVar = "https://arxiv.org/abs/2407.11550"
    evidence: ClassVar = Evidence.LAST_ROWS
    when: ClassVar = "prompt"
    attention: ClassVar = True

    def __post_init__(self) -> None:
        check_voting(self)
        Ada(share=self.share)  # checks it

    @property
    def head_split(self) -> Ada:
        return Ada(share=self.share, safeguard=self.safeguard, normalise=self.normalise)

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        return pooled_votes(self, view, rows)

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor:
        return voting_window(self, view)

    def reserved(self, budget: int) -> Mapping[str, int]:
        return {"window": self.window}
