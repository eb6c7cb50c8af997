"""Splits of a layer's budget over its KV heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvtool.lazy_torch import Tensor
from kvtool.maths.allocation import Allocation
from kvtool.policies.allocate.problem import AllocationProblem, Heads
from kvtool.policies.parts import Allocator


class HeadSplit(Allocator):
    """A way to split the budget of every layer over its KV heads; layers have equal budgets.

    Attributes:
        by_score: whether heads are compared by their slots' scores.
        whole_prompt: whether a prompt must have been read as a whole.
        fixed: whether `forecast` is what each head gets, whatever its scores.
        scores: what the heads of the model are ranked by, a file of a score per head or `proxy`;
            None: they are not.
    """

    by_score: ClassVar[bool] = False
    whole_prompt: ClassVar[bool] = True
    fixed: ClassVar[bool] = False
    scores: str | None = None

    @property
    def across_layers(self) -> bool:
        """Return whether heads of different layers compete for one budget."""
        return False

    def split(self, problem: AllocationProblem) -> Allocation:
        return problem.by_weight([0.0] * problem.layers)

    def forecast(
        self, budget: int, prompt: int, kv_heads: int, place: tuple[int, int]
    ) -> list[int]:
        """Forecast the tokens of each head of a layer; only their sum need be right.

        Args:
            budget: mean tokens per head, fewer than the prompt has.
            place: which layer it is of how many; sums over all layers are right, too.
        """
        return [budget] * kv_heads

    def tokens(self, heads: Heads) -> Tensor:
        """Count the tokens that each head may keep: (batch, kv_heads) int64. No device sync.

        A sequence whose text fits its budget gives every head that budget, as it would have alone.
        """
        raise NotImplementedError

    def tokens_of(self, layers: Sequence[Heads]) -> list[Tensor]:
        """Count the tokens of the heads of layers that are cut at once; no device sync."""
        return [self.tokens(heads) for heads in layers]
