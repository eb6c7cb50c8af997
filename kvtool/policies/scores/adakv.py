"""AdaKV: SnapKV whose KV heads compete for the budget of their layer.

Feng et al., 2024, https://arxiv.org/abs/2407.11550. Heads of wide attention keep more tokens than
heads that look at few; see `kvtool.policies.allocate.ada` for the split and for where its rounding
differs from the authors' code. A prompt in blocks is cut once, at its end, since heads compete by
their votes on the whole of it. With a plan that splits the budget, it is cut after every block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.policies.allocate.ada import Ada, AdaSettings
from kvtool.policies.scores.shared import Voting


@dataclass(frozen=True)
class AdaKV(AdaSettings, Voting):
    """SnapKV whose heads compete for their layer's budget; the budget is the mean over heads."""

    name: ClassVar = "adakv"

    @property
    def head_split(self) -> Ada:
        return Ada(share=self.share, safeguard=self.safeguard, normalise=self.normalise)
