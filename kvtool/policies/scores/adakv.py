"""AdaKV: SnapKV whose KV heads compete for the budget of their layer.

Feng et al., 2024, https://arxiv.org/abs/2407.11550. Heads of wide attention keep more tokens than
heads that look at few; see `kvtool.policies.allocate.ada` for the split and for where its rounding
differs from the authors' code. A prompt in blocks is cut once, at its end, since heads compete by
their votes on the whole of it. With a plan that splits the budget, it is cut after every block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvtool.policies.allocate.ada import Ada
from kvtool.policies.scores.shared import Voting
from kvtool.policies.spelling import limited


@dataclass(frozen=True)
class AdaKV(Voting):
    """SnapKV whose heads compete for their layer's budget; the budget is the mean over heads.

    Args:
        share: part of the budget that every head has for sure.
        safeguard: `mix` moves the heads' counts towards the mean by the share, `force` lets every
            head keep its own best tokens first.
        normalise: weigh each head by how much of its score its best tokens hold.
    """

    share: float = limited(0.2, "between 0 and 1")
    safeguard: Literal["mix", "force"] = "mix"
    normalise: bool = False

    name: ClassVar = "adakv"
    paper: ClassVar = "https://arxiv.org/abs/2407.11550"

    @property
    def head_split(self) -> Ada:
        return Ada(share=self.share, safeguard=self.safeguard, normalise=self.normalise)
