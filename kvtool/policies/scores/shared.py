"""Declare once what several scores share.

Some scores let the last queries of a prompt vote, some sum what each token receives, others always
keep the first and the newest tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvtool.lazy_torch import Tensor
from kvtool.maths.selection import pool_votes
from kvtool.policies.evidence import QueryMoments, asked
from kvtool.policies.numbers import half, minimum
from kvtool.policies.parts import AttentionRows, Count, Evidence, Positions, Score, SlotView, State
from kvtool.policies.spelling import computed, limited


class ByPosition(Score):
    """Score tokens by their place in the text: what is newer is kept."""

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        return view.positions.float()


@dataclass(frozen=True)
class Voting(Score):
    """Score the tokens of a prompt by the votes of its last queries, which spread to neighbours.

    Args:
        window: last queries of the prompt, which vote and are kept themselves.
        kernel: odd width of the pooling, in tokens; 1 = none.
        pool: `max` or `avg`.
    """

    window: int = limited(32, "1 or more")
    kernel: int = limited(7, "odd and 1 or more")
    pool: Literal["max", "avg"] = "max"

    evidence: ClassVar = Evidence.LAST_ROWS
    when: ClassVar = "prompt"
    attention: ClassVar = True

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        """Sum the votes of the last queries, and pool them: (batch, kv_heads, slots) float32."""
        weights = asked(rows).weights
        votes = weights.sum((2, 3)) / weights.shape[2]
        window = self._window(view)
        return pool_votes(
            votes,
            view.positions,
            window,
            kernel=self.kernel,
            pool=self.pool,
            in_order=view.in_order,
        )

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
    """

    recent: int | None = computed("budget/2", "0 or more")
    positions: Positions = "text"

    evidence: ClassVar = Evidence.COLUMNS
    attention: ClassVar = True

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


@dataclass(frozen=True)
class KeepsEnds(Score):
    """Keep the first and the newest tokens, and choose among the others.

    Args:
        sinks: first tokens that are always kept.
        recent: newest tokens that are always kept.
    """

    sinks: int = limited(0, "0 or more")
    recent: int = limited(0, "0 or more")

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor | None:
        if self.sinks == 0 and self.recent == 0:
            return None
        return view.sinks(self.sinks) | view.recent(self.recent)

    def reserved(self, budget: int) -> Mapping[str, int]:
        return {"sinks": self.sinks, "recent": self.recent}
