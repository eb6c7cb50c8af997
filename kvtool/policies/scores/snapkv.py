"""SnapKV: the last queries of the prompt vote, and their votes spread to neighbours.

Li et al., 2024, https://arxiv.org/abs/2404.14469, section 4.

Differences from the authors' code: keys are kept per KV head (they repeat them to every query head,
which costs the group's size in memory), the votes of a group are summed before the pooling, and
survivors stay in order. In a prompt run in blocks the last queries of each block vote, as CAOTE
does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvtool.policies.evidence import AttentionRows
from kvtool.policies.numbers import Count, State
from kvtool.policies.parts import Evidence, Score, SlotView
from kvtool.policies.scores.shared import check_voting, pooled_votes, voting_window

if TYPE_CHECKING:
    from torch import Tensor


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
        check_voting(self)

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        return pooled_votes(self, view, rows)

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor:
        return voting_window(self, view)

    def reserved(self, budget: int) -> Mapping[str, int]:
        return {"window": self.window}
