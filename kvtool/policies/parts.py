"""The roles of a policy, and what each is shown: all that a policy author reads.

A policy runs no attention and moves no key: it names its evidence, keeps numbers beside the slots
and ranks them. Shapes come in one order: batch, kv_heads, group, q_len, slots, head_dim. The words
are those of kvtool/README.md. A role is `score`, which gives each slot its importance, `rescore`,
`select`, `pace`, `allocate`, `evicted`, `read` or `codec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from kvtool.lazy_torch import Tensor
from kvtool.policies.evidence import AttentionRows as AttentionRows
from kvtool.policies.evidence import MomentsAsked, RepetitionAsked
from kvtool.policies.numbers import Count as Count
from kvtool.policies.numbers import HeadSizes as HeadSizes
from kvtool.policies.numbers import State as State
from kvtool.policies.slot_view import Evidence as Evidence
from kvtool.policies.slot_view import SlotView as SlotView

if TYPE_CHECKING:  # splitting a budget over layers needs no torch
    from kvtool.maths.allocation import Allocation
    from kvtool.policies.allocate.problem import AllocationProblem
    from kvtool.policies.read.view import Choice, ReadView, StepBudget, Stored

Positions = Literal["text", "cache"]  # place in the text, or among the tokens that are kept


class Role:
    """A part of a policy: a frozen dataclass of its settings, each with a default.

    Attributes:
        name: as typed in a policy string.
        paper: where it comes from.
    """

    name: ClassVar[str]
    paper: ClassVar[str]


class Score(Role):
    """A measure of what matters: it gives each slot a number, higher = keep.

    Attributes:
        evidence: which rows `observe` is given, and `importance` (the last ones of LAST_ROWS).
        window: how many rows or queries, when the evidence is LAST_ROWS or QUERIES.
        when: `always` holds the budget at every step; `prompt` cuts prompts, then appends; `never`.
        statistics: names of the float32 numbers kept beside each slot, which start at 0 and move
            with it. With COLUMNS those in `kvtool.maths.columns.COLUMNS` are summed for the score.
        draws: of its own where it draws at random: True, beside a setting `seed` (see `draws.py`).
        distinct: whether no two tokens of a head ever have the same number.
        layer_tokens: which tokens a layer may keep: `own`, whichever it chooses; `nested`, only
            such that the layer above keeps. The view shows them, and budgets must not grow with
            depth. `same`: those of all layers, which are cut at once, before a forward.

    Args:
        positions: `cache` numbers tokens by their place in the cache, for texts without end.
    """

    evidence: ClassVar[Evidence] = Evidence.NOTHING
    window: int = 1
    when: ClassVar[Literal["always", "prompt", "never"]] = "always"
    statistics: ClassVar[tuple[str, ...]] = ()
    distinct: ClassVar[bool] = False
    layer_tokens: ClassVar[Literal["own", "nested", "same"]] = "own"
    positions: Positions = "text"

    @property
    def attention(self) -> bool:
        """Return whether the scores are attention that each slot receives, as CAOTE needs it."""
        return False

    @property
    def unweighed(self) -> str | None:
        """Spell the score without the values that it weighs already; None: it weighs none."""
        return None

    @property
    def sees_projection(self) -> bool:
        """Return whether it looks at the attention's output projection, as `view.projections`."""
        return False

    @property
    def sees_hidden(self) -> bool:
        """Return whether `from_hidden` fills its statistics."""
        return False

    @property
    def moments(self) -> MomentsAsked:
        """Return what of the queries' moments is wanted, when the evidence is MOMENTS."""
        return MomentsAsked()

    @property
    def repetition(self) -> RepetitionAsked:
        """Return how the model repeats its prompt, when the evidence is REPETITION."""
        return RepetitionAsked()

    def observe(self, state: State, view: SlotView, rows: AttentionRows) -> None:
        """Add a chunk of rows to the statistics, in place; only with ALL_ROWS."""

    def from_hidden(self, hidden: Tensor, layer: int) -> State:
        """Make statistics of new tokens from what enters the attention layer; with `sees_hidden`.

        Args:
            hidden: (batch, tokens, hidden_size), of prompts and of decoded tokens.
            layer: index of the layer.

        Returns:
            (batch, all KV heads or 1, tokens) float32 by the name of the statistic.
        """
        raise NotImplementedError

    def voters(self, first_layer_budget: int) -> int:
        """Count the last rows of LAST_ROWS, by the tokens that the first layer may keep."""
        return self.window

    def vote_weights(self, rows: int, first_layer_budget: Count) -> Tensor | None:
        """Weigh the last rows, (batch or 1, rows), to come as one, their sum; None: one by one."""
        return None

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        """Give each slot a number, higher = keep: (batch, kv_heads or 1, slots) float32."""
        raise NotImplementedError

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor | None:
        """Mark the slots that stay whatever their score: bool (batch, kv_heads, slots); None: none.

        `evicted` is how many slots will be evicted.
        """
        return None

    def reserved(self, budget: int) -> Mapping[str, int]:
        """Count the tokens always kept, by parameter name; the budget must be above their sum."""
        return {}

    def choosing_bytes(self, layer: HeadSizes, slots: int) -> int:
        """Estimate the bytes that `importance` computes with, beyond what attention did, of a row.

        0: less than attention, whose memory is free again.
        """
        return 0

    @property
    def min_budget(self) -> int:
        """Return the smallest budget that an allocator gives a layer, if the mean allows it."""
        return 1

    @property
    def allocator(self) -> Allocator | None:
        """Return how the score splits the budget over layers by itself; None: equally."""
        return None

    @property
    def head_split(self) -> Allocator | None:
        """Return its `HeadSplit` of a layer's budget over the KV heads; None: equally."""
        return None

    @property
    def keeps_prompt(self) -> bool:
        """Return whether all tokens that are not decoded stay, within the budget."""
        return False

    @property
    def pace(self) -> Pace | None:
        """Return how many tokens the score decodes between two cuts; None: one."""
        return None

    @property
    def evicted(self) -> Evicted | None:
        """Return what the score makes of evicted tokens by itself; None: they are dropped."""
        return None

    @property
    def reader(self) -> Read | None:
        """Return the reader that the score comes with; None: what is stored is read in full.

        A reader without `k` takes the budget: it is then what a decode step reads, and what the
        score leaves of a prompt follows from it by RocketKV's plan.
        """
        return None

    def by_head(self) -> Score:
        """Return the score with a number per KV head, for parts that make heads differ."""
        return self


class Rescore(Role):
    """A change of the score that also looks at the values.

    Attributes:
        sees_projection: whether it looks at the attention's output projection, `view.projections`.
        at_cut: whether it comes once each head's budget is known, `view.budget`, as a prompt is
            cut. Protected slots then have an infinite importance, and heads have been given their
            budgets by the importance before it.
    """

    sees_projection: ClassVar[bool] = False
    at_cut: ClassVar[bool] = False

    def rescore(self, importance: Tensor, view: SlotView) -> Tensor:
        """Give each slot another number, higher = keep: (batch, kv_heads, slots) float32."""
        raise NotImplementedError


class Select(Role):
    """A way to choose tokens of a prompt, not one by one; the same in all heads of a layer."""

    @property
    def min_budget(self) -> int:
        """Return the smallest budget that it makes sense for."""
        return 1

    def order(self, importance: Tensor, view: SlotView, protected: Tensor | None) -> Tensor:
        """Give slots numbers to choose them by, higher = keep: (batch, 1, slots) float32.

        Args:
            importance: (batch, kv_heads, slots) float32.
            protected: bool (batch, kv_heads, slots), what stays anyway; None: nothing.
        """
        raise NotImplementedError


class Pace(Role):
    """A way to hold a budget that is not cut to after every decoded token."""

    @property
    def spare(self) -> int:
        """Return how many tokens above the budget are reached before a cut back to it."""
        raise NotImplementedError


class Allocator(Role):
    """A way to split a budget over layers; subclasses are frozen dataclasses of its settings.

    Attributes:
        metric: the measurement of a profile that it needs, None for none.
    """

    metric: ClassVar[str | None] = None

    @property
    def modifier(self) -> str:
        """Return what it is called in a policy string, where `d2o` is a base."""
        return "d2o-alloc" if self.name == "d2o" else self.name

    @property
    def measurement(self) -> str | None:
        """Return what `kvtool profile --metrics` is given for it, None for nothing."""
        return self.metric

    def split(self, problem: AllocationProblem) -> Allocation:
        """Give every layer its tokens; they sum to the total wherever the limits allow it."""
        raise NotImplementedError


class Evicted(Role):
    """A use of evicted tokens: merged, set aside, kept out of sight.

    Attributes:
        statistics: columns of attention (`kvtool.maths.columns.COLUMNS`) that it needs beside each
            slot; one that the score keeps under the same name is shared, and the score's.
        works_on_keys: whether it works on keys, whose rotation must not change then.
    """

    statistics: ClassVar[tuple[str, ...]] = ()
    works_on_keys: ClassVar[bool] = False

    def held_bytes(self, layer: HeadSizes, evicts: bool) -> int:
        """Count the bytes of them beside the slots, on the device, for one batch entry of a layer.

        `evicts` says whether decoded tokens take the place of others, one by one.
        """
        raise NotImplementedError

    def host_bytes(self, layer: HeadSizes, tokens: int) -> int:
        """Bound the bytes of `tokens` evicted tokens of one sequence in host memory."""
        return 0


class Read(Role):
    """A choice of the stored tokens that a decode step looks at; nothing leaves the cache by it.

    Tables are numbers beside the slots that make the choice cheap. They are made once, at the end
    of a prompt, and every new token is added in place.

    Attributes:
        divisor: a step attends to the budget divided by this; the rest of it pays for choosing.
        planned: whether sizes come from RocketKV's plan.
        k: tokens to attend to; None: from the budget.
        skip_layers: number of first layers that read all that they store.
        basis: a file of key bases for `start`; None: none.
    """

    divisor: ClassVar[int] = 2
    planned: ClassVar[bool] = False
    k: int | None = None
    skip_layers: int = 0
    basis: str | None = None

    @property
    def min_budget(self) -> int:
        """Return the smallest budget, in pairs of key and value."""
        return self.divisor

    def sized(self, step: StepBudget) -> Read:
        """Return the reader with every size that was left open."""
        raise NotImplementedError

    def start(self, stored: Stored) -> State:
        """Make the tables of what is stored, (batch, ...) each."""
        return {}

    def columns(self, tokens: int) -> Mapping[str, int]:
        """Return the length of the last axis of the tables that grow, for `tokens` tokens."""
        return {}

    def append(self, tables: State, key: Tensor, value: Tensor, at: int) -> None:
        """Add token number `at`, (batch, kv_heads, dim), to the tables, in place."""

    def choose(self, view: ReadView) -> Choice:
        """Choose the tokens to attend to; there are more of them than the budget."""
        raise NotImplementedError
