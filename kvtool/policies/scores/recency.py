"""Recency: a plain sliding window over the cache.

Differences from EasyKV's `recency`, which never evicts a prompt token while decoding: here the
oldest token goes, prompt or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.policies.parts import Positions
from kvtool.policies.scores.shared import ByPosition


@dataclass(frozen=True)
class Recency(ByPosition):
    """Keep the newest tokens."""

    positions: Positions = "text"

    name: ClassVar = "recency"
    paper: ClassVar = "-"
    distinct: ClassVar = True
