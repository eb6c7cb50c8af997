"""Full cache: nothing is evicted. The reference for every error measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.policies.scores.shared import ByPosition


@dataclass(frozen=True)
class Full(ByPosition):
    """Keep every token."""

    name: ClassVar = "full"
    paper: ClassVar = "-"
    when: ClassVar = "never"
