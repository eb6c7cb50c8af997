"""TOVA: the attention of the newest token alone decides (LTAS).

Oren et al., 2024, https://arxiv.org/abs/2401.06104, section 3.

Differences from the paper: none by default. `head_reduce=kv_head`, the form of RoCo, lets KV heads
keep different tokens; it is used by itself under CAOTE, whose scores differ by head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from kvtool.lazy_torch import Tensor
from kvtool.policies.evidence import asked
from kvtool.policies.parts import AttentionRows, Evidence, Positions, Score, SlotView, State


@dataclass(frozen=True)
class TOVA(Score):
    """Keep the tokens that the newest token attends to most.

    Args:
        head_reduce: `layer` averages over all query heads, so that every KV head keeps the same
            tokens; `kv_head` averages over the query heads of each KV head.
    """

    head_reduce: Literal["layer", "kv_head"] = "layer"
    positions: Positions = "text"

    name: ClassVar = "tova"
    paper: ClassVar = "https://arxiv.org/abs/2401.06104"
    evidence: ClassVar = Evidence.LAST_ROWS
    attention: ClassVar = True

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        last = asked(rows).weights[..., -1, :]
        if self.head_reduce == "layer":
            return view.heads.mean(last.mean(2)).unsqueeze(1)
        return last.mean(2)

    def by_head(self) -> TOVA:
        return replace(self, head_reduce="kv_head")
