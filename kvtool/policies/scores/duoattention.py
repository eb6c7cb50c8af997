"""DuoAttention: retrieval heads keep everything, streaming heads sinks and recent tokens.

Xiao et al., 2024, https://arxiv.org/abs/2410.10819. See `kvtool.policies.allocate.duo` for which
heads are which. The budget is the mean over heads and is turned into heads as RocketKV's authors do
it (https://arxiv.org/abs/2502.14051). Streaming heads keep 128 sinks and 512 recent tokens, and
what the budget leaves beyond that pays for heads that keep the whole prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvtool.lazy_torch import Tensor
from kvtool.policies.allocate.duo import PROXY, Duo, sink_tokens
from kvtool.policies.parts import Count, SlotView, State
from kvtool.policies.scores.shared import ByPosition


@dataclass(frozen=True)
class DuoAttention(ByPosition):
    """Keep everything in a few heads, and sinks and recent tokens in the others.

    Args:
        scores: file of a score per head, a line per layer, higher = keeps everything; `proxy`
            measures how far back each head looks in a random text.
    """

    scores: str = PROXY

    name: ClassVar = "duoattention"
    paper: ClassVar = "https://arxiv.org/abs/2410.10819"
    distinct: ClassVar = True

    @property
    def head_split(self) -> Duo:
        return Duo(scores=self.scores)

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor:
        return view.sinks(sink_tokens(view.budget))

    def reserved(self, budget: int) -> Mapping[str, int]:
        return {"sinks": sink_tokens(budget)}
