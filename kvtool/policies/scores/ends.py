"""What scores share that always keep the first and the newest tokens: mask and check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvtool.errors import UsageError
from kvtool.policies.parts import SlotView

if TYPE_CHECKING:
    from torch import Tensor


class KeepsEnds(Protocol):
    """The settings of such a score.

    Attributes:
        sinks: first tokens that are always kept.
        recent: newest tokens that are always kept.
    """

    @property
    def name(self) -> str: ...
    @property
    def sinks(self) -> int: ...
    @property
    def recent(self) -> int: ...


def check_ends(score: KeepsEnds) -> None:
    """Refuse counts below 0.

    Raises:
        UsageError: such a setting.
    """
    for field in ("sinks", "recent"):
        if getattr(score, field) < 0:
            raise UsageError(
                f"{score.name}: {field} must be 0 or more, got {getattr(score, field)}"
            )


def ends(score: KeepsEnds, view: SlotView) -> Tensor | None:
    """Mark the first and the newest tokens, bool (batch, kv_heads, slots); None: none stays."""
    if score.sinks == 0 and score.recent == 0:
        return None
    return view.sinks(score.sinks) | view.recent(score.recent)
