"""StreamingLLM: the first tokens, which serve as attention sinks, and the newest ones.

Xiao et al., 2023, https://arxiv.org/abs/2309.17453, section 3.2.

Differences from the paper: none with `positions=cache`. By default tokens keep the position at
which they were read. The paper numbers them by their place in the cache, which matters beyond the
length that a model was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvtool.lazy_torch import Tensor
from kvtool.policies.parts import Count, Positions, SlotView, State
from kvtool.policies.scores.shared import ByPosition
from kvtool.policies.spelling import limited


@dataclass(frozen=True)
class Streaming(ByPosition):
    """Keep the first tokens (attention sinks) and the newest.

    Args:
        sinks: first tokens of the text that are always kept, at least 0.
    """

    sinks: int = limited(4, "0 or more")
    positions: Positions = "text"

    name: ClassVar = "streaming"
    paper: ClassVar = "https://arxiv.org/abs/2309.17453"
    distinct: ClassVar = True

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor:
        return view.sinks(self.sinks)

    def reserved(self, budget: int) -> Mapping[str, int]:
        return {"sinks": self.sinks}
