"""RocketKV-MT: RocketKV for conversations, which drops nothing between turns.

Behnam et al., 2025, https://arxiv.org/abs/2502.14051, section 3.5. Everything stays stored. At the
end of every turn's prompt the first stage chooses anew, among all tokens so far, those that the
second stage reads from until the next turn, with what is generated meanwhile. A turn can so come
back to what another one had no use for.

Differences from the authors' code: what was chosen is an index into the stored tokens and no second
copy of them, and sizes are planned anew for the length of each turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.policies.evicted.eviction import SelectOnly
from kvtool.policies.scores.rocketkv import TwoStages


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
