"""Full cache: nothing is evicted. The reference for every error measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.lazy_torch import Tensor
from kvtool.policies.evidence import AttentionRows
from kvtool.policies.numbers import State
from kvtool.policies.parts import Score, SlotView


@dataclass(frozen=True)
class Full(Score):
    """Keep every token."""

    name: ClassVar = "full"
    paper: ClassVar = "-"
    when: ClassVar = "never"

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        return view.positions.float()
