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

from kvtool.errors import UsageError
from kvtool.lazy_torch import Tensor
from kvtool.policies.evidence import AttentionRows
from kvtool.policies.numbers import Count, State
from kvtool.policies.parts import Positions, Score, SlotView


@dataclass(frozen=True)
class Streaming(Score):
    """Keep the first tokens (attention sinks) and the newest.

    Args:
        sinks: first tokens of the text that are always kept, at least 0.
        positions: `cache` numbers tokens by their place in the cache, for texts without end.
    """

    sinks: int = 4
    positions: Positions = "text"

    name: ClassVar = "streaming"
    paper: ClassVar = "https://arxiv.org/abs/2309.17453"
    distinct: ClassVar = True

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise UsageError(f"streaming: sinks must be 0 or more, got {self.sinks}")

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        return view.positions.float()

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor:
        return view.sinks(self.sinks)

    def reserved(self, budget: int) -> Mapping[str, int]:
        return {"sinks": self.sinks}
