"""RocketKV: SnapKV cuts the prompt, then every step reads a part of what is left.

Behnam et al., 2025, https://arxiv.org/abs/2502.14051. The budget t is what a decode step reads. Of
a prompt of S tokens SnapKV (window 32, max pooling over 63) keeps about S / c^r with c = S / t, and
hybrid sparse attention (`kvtool.policies.read.hsa`) reads t pairs of them and of what is generated.
`kvtool.planning.rocketkv_stages` has the arithmetic.

Differences from the authors' code: the last queries of the whole prompt vote, and the prompt is cut
once at its end, also where it is computed in blocks. The code leaves the last token out, and cuts
after every block. Survivors stay in order. What fits into t is kept and read in full.

`rocketkv-mt` (section 3.5) is for conversations: it drops nothing between turns. At the end of each
turn's prompt the first stage chooses anew, among all tokens so far, those that the second stage
reads from until the next turn, with what is generated meanwhile. So a turn can come back to what
another one had no use for. Differences from the authors' code: what was chosen is an index into the
stored tokens and no second copy of them. Sizes are planned anew for the length of each turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvtool.policies.evicted.eviction import SelectOnly
from kvtool.policies.read.hsa import HSA
from kvtool.policies.scores.shared import Voting
from kvtool.policies.spelling import computed, limited


@dataclass(frozen=True)
class TwoStages(Voting):
    """Choose tokens of a prompt by votes, and read a part of them at every step.

    Args:
        split: share of the compression that the first stage takes; None: by the compression.
        skip_layers: number of first layers that read all that they store.
    """

    kernel: int = limited(63, "odd and 1 or more")
    split: float | None = computed("min(0.8, 0.2 + 0.06 log2 compression)", "between 0 and 1")
    skip_layers: int = limited(0, "0 or more")

    paper: ClassVar = "https://arxiv.org/abs/2502.14051"

    @property
    def reader(self) -> HSA:
        return HSA(skip_layers=self.skip_layers)

    def reserved(self, budget: int) -> Mapping[str, int]:
        return {}  # the budget is read, not stored


@dataclass(frozen=True)
class RocketKV(TwoStages):
    """SnapKV on the prompt, then hybrid sparse attention over what is left."""

    name: ClassVar = "rocketkv"


@dataclass(frozen=True)
class RocketKVMT(TwoStages):
    """RocketKV that keeps everything and chooses anew in every turn.

    Args:
        window: last queries of the turn, which vote and are read from themselves.
    """

    name: ClassVar = "rocketkv-mt"

    @property
    def evicted(self) -> SelectOnly:
        return SelectOnly()
