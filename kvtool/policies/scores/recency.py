"""Recency: a plain sliding window over the cache.

Differences from EasyKV's `recency`, which never evicts a prompt token while decoding: here the
oldest token goes, prompt or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.lazy_torch import Tensor
from kvtool.policies.evidence import AttentionRows
from kvtool.policies.numbers import State
from kvtool.policies.parts import Positions, Score, SlotView


@dataclass(frozen=True)
class Recency(Score):
    """Keep the newest tokens.

    Args:
        positions: `cache` numbers tokens by their place in the cache, for texts without end.
    """

    positions: Positions = "text"

    name: ClassVar = "recency"
    paper: ClassVar = "-"
    distinct: ClassVar = True

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        return view.positions.float()
