"""What scores share: votes of the last queries, and the masks and checks of windows and sinks.

One half serves scores that let the last queries of a prompt vote, the other those that always keep
the first and the newest tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvtool.errors import UsageError
from kvtool.maths.votes import pool_votes
from kvtool.policies.evidence import AttentionRows, asked
from kvtool.policies.numbers import minimum
from kvtool.policies.parts import SlotView

if TYPE_CHECKING:
    from torch import Tensor


class Voting(Protocol):
    """The settings of such a score.

    Attributes:
        window: last queries of the prompt, which vote and are kept themselves.
        kernel: odd width of the pooling, in tokens; 1 = none.
        pool: `max` or `avg`.
    """

    @property
    def name(self) -> str: ...
    @property
    def window(self) -> int: ...
    @property
    def kernel(self) -> int: ...
    @property
    def pool(self) -> str: ...


def pooled_votes(score: Voting, view: SlotView, rows: AttentionRows | None) -> Tensor:
    """Sum the votes of the last queries, and pool them: (batch, kv_heads, slots) float32."""
    weights = asked(rows).weights
    votes = weights.sum((2, 3)) / weights.shape[2]
    return pool_votes(
        votes, view.positions, voting_window(score, view), kernel=score.kernel, pool=score.pool
    )


def voting_window(score: Voting, view: SlotView) -> Tensor:
    """Mark the tokens whose queries vote: bool (batch, kv_heads, slots)."""
    return view.recent(minimum(score.window, view.block))


def check_voting(score: Voting) -> None:
    """Refuse a window that is empty, and a kernel that has no middle.

    Raises:
        UsageError: such a setting.
    """
    if score.window < 1:
        raise UsageError(f"{score.name}: window must be 1 or more, got {score.window}")
    if score.kernel < 1 or score.kernel % 2 == 0:
        raise UsageError(f"{score.name}: kernel must be odd and 1 or more, got {score.kernel}")


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
