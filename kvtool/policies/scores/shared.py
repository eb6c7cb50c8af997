"""Declare once what several scores share.

Some scores let the last queries of a prompt vote, some sum what each token receives, others always
keep the first and the newest tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from kvtool.errors import UsageError
from kvtool.lazy_torch import Tensor
from kvtool.maths.selection import pool_votes
from kvtool.policies.evidence import AttentionRows, QueryMoments, asked
from kvtool.policies.numbers import Count, State, half, minimum
from kvtool.policies.parts import Evidence, Positions, Score, SlotView
from kvtool.policies.spelling import computed


@dataclass(frozen=True)
class Voting(Score):
    """Score the tokens of a prompt by the votes of its last queries, which spread to neighbours.

    Args:
        window: last queries of the prompt, which vote and are kept themselves.
        kernel: odd width of the pooling, in tokens; 1 = none.
        pool: `max` or `avg`.
    """

    window: int = 32
    kernel: int = 7
    pool: Literal["max", "avg"] = "max"

    evidence: ClassVar = Evidence.LAST_ROWS
    when: ClassVar = "prompt"
    attention: ClassVar = True

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UsageError(f"{self.name}: window must be 1 or more, got {self.window}")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise UsageError(f"{self.name}: kernel must be odd and 1 or more, got {self.kernel}")

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        """Sum the votes of the last queries, and pool them: (batch, kv_heads, slots) float32."""
        weights = asked(rows).weights
        votes = weights.sum((2, 3)) / weights.shape[2]
        window = self._window(view)
        return pool_votes(votes, view.positions, window, kernel=self.kernel, pool=self.pool)

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor:
        return self._window(view)

    def _window(self, view: SlotView) -> Tensor:
        """Mark the tokens whose queries vote: bool (batch, kv_heads, slots)."""
        return view.recent(minimum(self.window, view.block))

    def reserved(self, budget: int) -> Mapping[str, int]:
        return {"window": self.window}


@dataclass(frozen=True)
class Summing(Score):
    """Keep the tokens with the largest sum of their one statistic, and a recent window.

    Args:
        recent: newest tokens that are always kept; None: half of the budget.
        positions: `cache` numbers tokens by their place in the cache, for texts without end.
    """

    recent: int | None = computed("budget/2")
    positions: Positions = "text"

    evidence: ClassVar = Evidence.COLUMNS
    attention: ClassVar = True

    def __post_init__(self) -> None:
        if self.recent is not None and self.recent < 0:
            raise UsageError(f"{self.name}: recent must be 0 or more, got {self.recent}")

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        return state[self.statistics[0]]

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor:
        return view.recent(half(view.budget) if self.recent is None else self.recent)

    def reserved(self, budget: int) -> Mapping[str, int]:
        return {"recent": half(budget) if self.recent is None else self.recent}


def moments_of_layers(view: SlotView) -> tuple[QueryMoments, ...]:
    """Return the moments of the queries of each layer of a view, which a score has asked for."""
    if len(view.moments) != len(view.keys):
        raise ValueError("this score has MOMENTS as its evidence, and was given none")
    return view.moments


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
