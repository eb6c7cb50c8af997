"""RocketKV-MT: RocketKV for conversations, which drops nothing between turns.

Behnam et al., 2025, https://arxiv.org/abs/2502.14051, section 3.5. Everything stays stored; at the
end of every turn's prompt the first stage chooses anew, among all tokens so far, those that the
second stage reads from until the next turn, with what is generated meanwhile. A turn can so come
back to what another one had no use for.

Differences from the authors' code: what was chosen is an index into the stored tokens and no second
copy of them, and sizes are planned anew for the length of each turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvtool.policies.evicted.eviction import SelectOnly
from kvtool.policies.evidence import AttentionRows
from kvtool.policies.numbers import Count, State
from kvtool.policies.parts import Evidence, Score, SlotView
from kvtool.policies.read.hsa import HSA
from kvtool.policies.scores.rocketkv import check_split
from kvtool.policies.scores.shared import check_voting, pooled_votes, voting_window
from kvtool.policies.spelling import computed

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RocketKVMT(Score):
    """RocketKV that keeps everything and chooses anew in every turn.

    Args:
        window: last queries of the turn, which vote and are read from themselves.
        kernel: odd width of the pooling, in tokens; 1 = none.
        pool: `max` or `avg`.
        split: share of the compression that the first stage takes; None: by the compression.
        skip_layers: number of first layers that read all that they store.
    """

    window: int = 32
    kernel: int = 63
    pool: Literal["max", "avg"] = "max"
    split: float | None = computed("min(0.8, 0.2 + 0.06 log2 compression)")
    skip_layers: int = 0

    name: ClassVar = "rocketkv-mt"
    paper: ClassVar = "https://arxiv.org/abs/2502.14051"
    evidence: ClassVar = Evidence.LAST_ROWS
    when: ClassVar = "prompt"
    attention: ClassVar = True

    def __post_init__(self) -> None:
        check_voting(self)
        check_split(self.name, self.split)

    @property
    def reader(self) -> HSA:
        return HSA(skip_layers=self.skip_layers)

    @property
    def evicted(self) -> SelectOnly:
        return SelectOnly()

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        return pooled_votes(self, view, rows)

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor:
        return voting_window(self, view)
