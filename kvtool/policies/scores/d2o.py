"""D2O: heavy hitters beside sinks and a recent window, merged instead of dropped, layer by layer.

Wan et al., 2024, https://arxiv.org/abs/2406.13035, sections 4.1 to 4.3. The score is accumulated
attention (H2O); the budget of a layer is split 3:1 between heavy hitters and the newest tokens,
sinks beside them. Layers get their budgets from `kvtool.policies.allocate.d2o`, and evicted tokens
are merged by `kvtool.policies.evicted.d2o_merge`.

Differences from the authors' code: it compresses at the first decoded token, not at the prompt's
end, keeps keys and values once per query head, and puts the sinks inside the heavy hitters. Its
README has a split of 1:1, the paper 3:1. The paper gives no least budget of a layer; here it is the
sinks, 3 heavy hitters and 1 recent token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvtool.lazy_torch import Tensor, torch
from kvtool.policies.allocate import d2o as allocate
from kvtool.policies.evicted.d2o_merge import D2OMerge
from kvtool.policies.numbers import AnyCount
from kvtool.policies.parts import AttentionRows, Count, Evicted, Evidence, Score, SlotView, State
from kvtool.policies.spelling import limited

_HEAVY = 0.75  # of what the sinks leave of a budget; the rest is recent


def recent_tokens(budget: AnyCount, sinks: int) -> AnyCount:
    """Count the newest tokens that a layer keeps: a quarter of what the sinks leave.

    >>> recent_tokens(100, sinks=4)
    24
    """
    free = budget - sinks
    if isinstance(free, int):
        return free - round(free * _HEAVY)
    return free - torch.round(free * _HEAVY).to(free.dtype)


@dataclass(frozen=True)
class D2O(Score):
    """Keep sinks, heavy hitters and the newest; give dense layers more, merge evicted tokens.

    Args:
        sinks: first tokens that are always kept.
        beta: weight of the newest similarity in the threshold of the merging.
        merge: `kv` merges keys and values, `v` values alone, `none` drops what is evicted.
    """

    sinks: int = limited(4, "0 or more")
    beta: float = limited(0.7, "above 0 and at most 1")
    merge: Literal["kv", "v", "none"] = "kv"

    name: ClassVar = "d2o"
    paper: ClassVar = "https://arxiv.org/abs/2406.13035"
    evidence: ClassVar = Evidence.COLUMNS
    statistics: ClassVar = ("attention_sum",)
    attention: ClassVar = True

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        return state["attention_sum"]

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor:
        return view.sinks(self.sinks) | view.recent(recent_tokens(view.budget, self.sinks))

    def reserved(self, budget: int) -> Mapping[str, int]:
        return {"sinks": self.sinks, "recent": max(recent_tokens(budget, self.sinks), 0)}

    @property
    def min_budget(self) -> int:
        return self.sinks + 4

    @property
    def allocator(self) -> allocate.D2O:
        return allocate.D2O()

    @property
    def evicted(self) -> Evicted | None:
        return None if self.merge == "none" else D2OMerge(beta=self.beta, merge=self.merge)
