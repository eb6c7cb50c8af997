"""PyramidKV: SnapKV in every layer, with budgets that fall from the first layer to the last.

Cai et al., 2024, https://arxiv.org/abs/2406.02069, section 4. The budget is the mean over the
layers, observation window included; see `kvtool.policies.allocate.pyramid` for the line and for
where its rounding differs from the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.policies.allocate.pyramid import Pyramid
from kvtool.policies.scores.shared import Voting
from kvtool.policies.spelling import limited


@dataclass(frozen=True)
class PyramidKV(Voting):
    """SnapKV with more tokens for lower layers; the budget is the mean.

    Args:
        beta: how steep: the last layer has 1/beta of the mean beside the window.
    """

    window: int = limited(8, "1 or more")
    beta: float = limited(20.0, "1 or more")

    name: ClassVar = "pyramidkv"
    paper: ClassVar = "https://arxiv.org/abs/2406.02069"

    @property
    def allocator(self) -> Pyramid:
        return Pyramid(beta=self.beta)
