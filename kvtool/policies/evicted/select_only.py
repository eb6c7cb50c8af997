"""Evicted tokens that stay stored: the reader looks at the others until the next prompt.

RocketKV-MT (Behnam et al., 2025, https://arxiv.org/abs/2502.14051, section 3.5) drops nothing
between turns: each turn chooses anew, among all tokens so far.
"""

from dataclasses import dataclass
from typing import ClassVar

from kvtool.policies.heads import HeadSizes
from kvtool.policies.parts import Evicted


@dataclass(frozen=True)
class SelectOnly(Evicted):
    """Keep evicted tokens stored, out of the reader's sight, until the next prompt."""

    name: ClassVar = "select-only"
    paper: ClassVar = "https://arxiv.org/abs/2502.14051"

    def held_bytes(self, layer: HeadSizes, evicts: bool) -> int:
        return 0  # they lie in slots
