"""RocketKV: SnapKV cuts the prompt, then every step reads a part of what is left.

Behnam et al., 2025, https://arxiv.org/abs/2502.14051. The budget t is what a decode step reads; of
a prompt of S tokens SnapKV (window 32, max pooling over 63) keeps about S / c^r with c = S / t, and
hybrid sparse attention (`kvtool.policies.read.hsa`) reads t pairs of them and of what is generated.
`kvtool.planning.rocketkv` has the arithmetic.

Differences from the authors' code: the last queries of the whole prompt vote, and the prompt is cut
once at its end, also where it is computed in blocks (the code leaves the last token out, and cuts
after every block); survivors stay in order. What fits into t is kept and read in full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvtool.errors import UsageError
from kvtool.policies.evidence import AttentionRows
from kvtool.policies.numbers import Count, State
from kvtool.policies.parts import Evidence, Score, SlotView
from kvtool.policies.read.hsa import HSA
from kvtool.policies.scores.shared import check_voting, pooled_votes, voting_window
from kvtool.policies.spelling import computed

if TYPE_CHECKING:
    from torch import Tensor


def check_split(name: str, split: float | None) -> None:
    """Refuse a share of the compression that is no share.

    Raises:
        UsageError: it is below 0 or above 1.
    """
    if split is not None and not 0 <= split <= 1:
        raise UsageError(f"{name}: split must be between 0 and 1, got {split}")


@dataclass(frozen=True)
class RocketKV(Score):
    """SnapKV on the prompt, then hybrid sparse attention over what is left.

    Args:
        window: last queries of the prompt, which vote and are kept themselves.
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

    name: ClassVar = "rocketkv"
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

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        return pooled_votes(self, view, rows)

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor:
        return voting_window(self, view)
