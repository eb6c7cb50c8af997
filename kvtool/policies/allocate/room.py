"""What there is to split, and what may be known about it: all that an allocator is shown.

Only layers whose budget is free stand here: not those with a sliding window or without attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvtool.maths.allocation import Allocation, allocate

UNLIMITED = 2**30  # tokens of a head that keeps everything, whatever comes

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ErrorCurves:
    """How far each layer's attention output moves under each of a few budgets.

    Attributes:
        budgets: tokens per layer and KV head, ascending.
        errors: layers x budgets, 0 or more.
    """

    budgets: Sequence[int]
    errors: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Room:
    """A total to split over layers, for a prompt of a known length.

    Attributes:
        total: tokens of all layers together, per KV head.
        lo: least of each layer.
        hi: most of each layer: the tokens of the prompt.
        window: newest tokens that every layer keeps, where the policy has such a window.
        variance: F of each layer (see `kvtool.policies.allocate.d2o`), None if not measured.
        largest: the largest F that each layer could have had, n - 1 over a prompt of n tokens.
        curves: output error against budget, None if not measured.
    """

    total: int
    lo: Sequence[int]
    hi: Sequence[int]
    window: int | None = None
    variance: Sequence[float] | None = None
    largest: Sequence[float] | None = None
    curves: ErrorCurves | None = None

    @property
    def layers(self) -> int:
        """How many layers share the total."""
        return len(self.lo)

    def by_weight(self, log_weights: Sequence[float]) -> Allocation:
        """Split in proportion to weights, given as logarithms."""
        return allocate(log_weights, self.total, self.lo, self.hi)


class Allocator:
    """A way to split a budget over layers; subclasses are frozen dataclasses of its settings.

    Attributes:
        name: as typed after `--allocator`.
        paper: where it comes from.
        metric: the measurement of a profile that it needs, None for none.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    metric: ClassVar[str | None] = None

    @property
    def modifier(self) -> str:
        """What it is called in a policy string, where `d2o` is a base."""
        return "d2o-alloc" if self.name == "d2o" else self.name

    def split(self, room: Room) -> Allocation:
        """Give every layer its tokens; they sum to the total wherever the limits allow it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Heads:
    """A layer's budget to split over its KV heads, when the layer is cut.

    Attributes:
        budget: mean tokens per head, one number or (batch, 1, 1).
        importance: (batch, kv_heads, slots) float32, higher = keep.
        positions: (batch, kv_heads, slots), -1 = empty.
        protected: bool (batch, kv_heads, slots), slots that stay in any case; None: none.
        least: tokens that every head must have beside the protected ones.
        tokens_seen: tokens of the text so far, one number or (batch, 1, 1).
        rank: (kv_heads,) int64, place of each head among all heads of the model, 0 for the one that
            most needs the whole text; None where nobody has ranked them.
        of: how many heads were ranked.
    """

    budget: int | Tensor
    importance: Tensor
    positions: Tensor
    protected: Tensor | None
    least: int
    tokens_seen: int | Tensor
    rank: Tensor | None = None
    of: int = 0


class HeadSplit(Allocator):
    """A way to split the budget of every layer over its KV heads; layers have equal budgets.

    Attributes:
        by_score: whether heads are compared by their slots' scores.
        whole_prompt: whether a prompt must have been read as a whole.
        ranking: whether the heads of the model must have been ranked, by what `scores` names.
    """

    by_score: ClassVar[bool] = False
    whole_prompt: ClassVar[bool] = True
    ranking: ClassVar[bool] = False

    def split(self, room: Room) -> Allocation:
        return room.by_weight([0.0] * room.layers)

    def forecast(
        self, budget: int, prompt: int, kv_heads: int, place: tuple[int, int]
    ) -> list[int]:
        """Tokens that the heads of a layer will hold, of which only the sum need be right.

        Args:
            budget: mean tokens per head, fewer than the prompt has.
            place: which layer it is of how many; sums over all layers are right, too.
        """
        return [budget] * kv_heads

    def tokens(self, heads: Heads) -> Tensor:
        """Tokens that each head may keep: (batch, kv_heads) int64. No device sync.

        A row whose text fits its budget gives every head that budget, as it would have alone.
        """
        raise NotImplementedError
