"""A prompt that the model says once more: the evidence of a score that asks what that needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_FIRST = "\n\nRepeat the previous context exactly."
_LATER = "\n\nRepeat the part of the previous context exactly, starting with"


@dataclass(frozen=True)
class RepetitionAsked:
    """What a score wants the model to repeat.

    Args:
        chunk: tokens that are repeated at a time.
        sinks: so many first tokens are not repeated; they are attended to beside every chunk.
        instruction: what the model is told; None: KVzip's words.
        lead: tokens of the chunk before that stand before those of a chunk.
    """

    chunk: int = 2048
    sinks: int = 0
    instruction: str | None = None
    lead: int = 8

    @property
    def first(self) -> str:
        """Return what is said before the first chunk."""
        return _FIRST if self.instruction is None else self.instruction

    @property
    def later(self) -> str:
        """Return what is said before every other chunk."""
        return _LATER if self.instruction is None else self.instruction


@dataclass(frozen=True)
class Repeated:
    """What the slots have received while the model repeated their prompt.

    Attributes:
        weights: (batch, kv_heads, slots) float32, the highest weight on each slot in the pass that
            repeated it; 0 where none did.
        tokens: bool (batch, kv_heads, slots), the slots that some pass has repeated.
    """

    weights: Tensor
    tokens: Tensor
