"""What a policy is made of, and what it is shown: all that a policy author needs to read.

A policy never runs attention and never moves a key. It says what evidence it wants to see, keeps
small statistics beside the slots, and gives every slot a number; the cache does the rest. Shapes
come in one order everywhere: batch, kv_heads, group, q_len, slots, head_dim.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from kvtool.policies.allocate.room import Allocator, HeadSplit
from kvtool.policies.heads import ALL_HERE, KVHeads

if TYPE_CHECKING:
    from kvtool.policies.read.reader import Read

State = dict[str, Tensor]
TURN = "turn"  # beside a slot where `positions=cache`: its place, minus where its key stands
Positions = Literal["text", "cache"]  # what keys are turned by: place in the text or in the cache
Count = int | Tensor  # one number, or one per row (batch, 1, 1), or per head (batch, kv_heads, 1)


class Evidence(enum.Enum):
    """What a score wants to see of every block: attention rows, sums of them, or the logits."""

    NOTHING = "nothing"
    LAST_ROWS = "last rows"  # the last `window` queries, once the block is attended
    ALL_ROWS = "all rows"  # every query, in chunks, while the block is attended
    COLUMNS = "columns"  # sums over every query: statistics named as in `kvtool.maths.columns`
    LOGITS = "logits"  # each token's surprisal, as `state["surprisal"]`; one cut for all layers


def _all_here() -> KVHeads:
    """Return the default of a view: torch 2.11's compiler cannot trace an object in its place."""
    return ALL_HERE


@dataclass(frozen=True)
class Rows:
    """Attention weights of some queries of the running block.

    Attributes:
        weights: (batch, kv_heads, group, rows, slots) float32. Rows of padding are 0. A chunk in
            the middle of a prompt stops at its last key: `slots` is then smaller than the view's.
        visible: bool, broadcastable to (batch, kv_heads, rows, slots): the keys that a row could
            see. None: all.
        valid: bool (batch, rows), False where the row is padding; None: no padding.
    """

    weights: Tensor
    visible: Tensor | None = None
    valid: Tensor | None = None

    @property
    def slots(self) -> int:
        """How many slots these rows reach."""
        return self.weights.shape[-1]

    def group_mean(self) -> Tensor:
        """Mean weight over the query heads of a group: (batch, kv_heads, rows, slots)."""
        return self.weights.mean(2)

    def summed(self, vote_weights: Tensor) -> "Rows":
        """One row in place of all: their sum, each times its weight, (batch or 1, rows)."""
        weights = self.weights * vote_weights[:, None, None, :, None]
        return Rows(weights.sum(3, keepdim=True))


@dataclass(frozen=True)
class SlotView:
    """The slots of one layer as a policy sees them, the running block included. Read only.

    In steady state one view covers several layers, stacked along the batch; only the values come
    layer by layer.

    Attributes:
        values: (batch, kv_heads, slots, value_dim) of each layer.
        positions: (batch, kv_heads, slots), the true position of the token in each slot; -1 =
            empty. In no order.
        tokens_seen: tokens of the row so far, the running block included.
        budget: slots the row may keep in each head; the mean where heads differ.
        held: slots of the row that are not empty; where heads differ, of each head.
        layer: index of the layer, one number or one per row.
        block: tokens of the row in the running block.
        heads: all KV heads of the layer, for what is decided across heads; a process may hold a
            part of them.
        above: which slots hold tokens that the layer above keeps, bool (batch, 1, slots), for a
            score that is `nested`; None: no layer is above.
        widest: what the first layer may keep, for such a score.
    """

    values: tuple[Tensor, ...]
    positions: Tensor
    tokens_seen: Count
    budget: Count
    held: Count
    layer: Count = 0
    block: Count = 1
    heads: KVHeads = field(default_factory=_all_here)
    above: Tensor | None = None
    widest: Count | None = None

    @property
    def stored(self) -> Tensor | None:
        """Which slots are not empty, bool (batch, kv_heads, slots); None: all."""
        return self.positions >= 0 if isinstance(self.held, Tensor) else None

    def recent(self, count: Count) -> Tensor:
        """Mark the newest `count` tokens: bool (batch, kv_heads, slots)."""
        return self.positions >= self.tokens_seen - count

    def sinks(self, count: int) -> Tensor:
        """Mark the first `count` tokens, and empty slots: bool (batch, kv_heads, slots)."""
        return self.positions < count


class Score:
    """What matters: gives each slot a number, higher = keep.

    Attributes:
        name: as typed in a policy string.
        paper: where it comes from.
        evidence: which attention rows `observe` and `importance` are given.
        window: how many rows, when the evidence is LAST_ROWS.
        when: `always` holds the budget after every block and token; `prompt` cuts the prompt and
            then appends; `never` keeps everything.
        statistics: names of the float32 numbers kept beside each slot; they start at 0 and move
            with the slots. With COLUMNS those named in `kvtool.maths.columns.COLUMNS` are summed up
            for the score, in whatever way is fast.
        attention: whether the scores are attention that each slot received (CAOTE needs such
            scores).
        distinct: whether no two tokens of a head ever have the same number.
        nested: whether a layer keeps only tokens that the layer above it keeps, of which its
            `importance` and `protected` are told; the budgets must not grow with depth.
        positions: what keys and queries are turned by: `text`, their place in the text, or `cache`,
            their place among the tokens that are kept.
        least: smallest budget that an allocator should give to a layer, if the mean allows it.
        reads: whether the budget is what a decode step reads; what is stored follows from it, by
            RocketKV's plan.
        once: whether a prompt in blocks is cut once, at its end, and not after every block.
        marks: whether nothing leaves: what would stay is what the reader looks at, with what is
            generated, until the next prompt.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    evidence: ClassVar[Evidence] = Evidence.NOTHING
    window: int = 1
    when: ClassVar[Literal["always", "prompt", "never"]] = "always"
    statistics: ClassVar[tuple[str, ...]] = ()
    attention: ClassVar[bool] = False
    distinct: ClassVar[bool] = False
    nested: ClassVar[bool] = False
    positions: Positions = "text"
    least: int = 1
    reads: ClassVar[bool] = False
    once: ClassVar[bool] = False
    marks: ClassVar[bool] = False

    def observe(self, state: State, view: SlotView, rows: Rows) -> None:
        """Add a chunk of rows to the statistics, in place; only with ALL_ROWS."""

    def voters(self, widest: int) -> int:
        """How many last rows LAST_ROWS are, where the first layer may keep `widest` tokens."""
        return self.window

    def vote_weights(self, rows: int, widest: Count) -> Tensor | None:
        """Weights of the last rows, the newest at the end, (batch or 1, rows); None: leave them.

        Rows that have weights come as one, their weighted sum, so that there may be many.
        """
        return None

    def importance(self, state: State, view: SlotView, rows: Rows | None) -> Tensor:
        """Number for each slot, higher = keep: (batch, kv_heads or 1, slots) float32.

        `rows` are the last rows for LAST_ROWS, and None for a score that keeps statistics or needs
        no attention.
        """
        raise NotImplementedError

    def protected(self, state: State, view: SlotView, victims: Count) -> Tensor | None:
        """Slots that must stay whatever their score: bool (batch, kv_heads, slots); None: none.

        Args:
            victims: how many slots will be given up.
        """
        return None

    def reserved(self, budget: int) -> Mapping[str, int]:
        """Tokens always kept, by parameter name; the budget must be above their sum."""
        return {}

    @property
    def allocator(self) -> Allocator | None:
        """How the score splits the budget over layers by itself; None: equally."""
        return None

    @property
    def head_split(self) -> HeadSplit | None:
        """How the score splits a layer's budget over its KV heads by itself; None: equally."""
        return None

    @property
    def evicted(self) -> "Evicted | None":
        """What the score makes of evicted tokens by itself; None: they are gone."""
        return None

    @property
    def reader(self) -> "Read | None":
        """The reader that the score comes with; None: what is stored is read in full."""
        return None

    def by_head(self) -> "Score":
        """The same score with its own number per KV head, for parts that make heads differ."""
        return self


class Rescore:
    """Turns a score into another one that also looks at the values."""

    name: ClassVar[str]
    paper: ClassVar[str]

    def rescore(self, importance: Tensor, view: SlotView) -> Tensor:
        """New number for each slot, higher = keep: (batch, kv_heads, slots) float32."""
        raise NotImplementedError


class HeadSizes(Protocol):
    """Sizes of a layer's heads: how many store and ask, numbers of a key and of a value."""

    kv_heads: int
    heads: int
    key_dim: int
    value_dim: int
    itemsize: int
    token_bytes: int


@dataclass(frozen=True)
class Departure:
    """Tokens that leave a layer, and those that stay.

    Attributes:
        keys, values: (batch, kv_heads, slots, dim) of both.
        state: the numbers beside these slots.
        gone: (batch, kv_heads, victims) int64, the slots of those that leave.
        gone_positions: their true positions; -1 where a head loses fewer than `victims`.
        kept_keys, kept_values: (batch, kv_heads, kept, dim) of those that stay, to be changed in
            place; of one decoded token they are `keys` and `values` themselves.
        kept_state: the numbers beside these.
        kept_positions: their true positions, -1 = empty; ascending, unless one token was decoded.
        tokens_seen: tokens of the row so far.
        layer: index of the layer.
        heads: all KV heads of the layer, of which these may be a part.
        whole: whether every head loses `victims`.
        importance: (batch, kv_heads, slots) float32 by which a block was judged; None for a decoded
            token.
    """

    keys: Tensor
    values: Tensor
    state: State
    gone: Tensor
    gone_positions: Tensor
    kept_keys: Tensor
    kept_values: Tensor
    kept_state: State
    kept_positions: Tensor
    tokens_seen: Count
    layer: int
    whole: bool = False
    heads: KVHeads = field(default_factory=_all_here)
    importance: Tensor | None = None

    @property
    def decoded(self) -> bool:
        """Whether one token leaves for one that was decoded: kept slots are in no order."""
        return self.importance is None


class Evicted:
    """What becomes of the tokens that leave.

    Attributes:
        name: as typed in a policy string.
        paper: where it comes from.
        statistics: columns of attention (`kvtool.maths.columns.COLUMNS`) that it needs beside each
            slot; one that the score keeps under the same name is shared, and the score's.
        works_on_keys: whether it works on keys, which must stand still for it.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    statistics: ClassVar[tuple[str, ...]] = ()
    works_on_keys: ClassVar[bool] = False

    def held_bytes(self, layer: "HeadSizes", evicts: bool) -> int:
        """Bytes that one row of a layer holds of them beside its slots, host memory aside.

        Args:
            evicts: whether decoded tokens take the place of others.
        """
        raise NotImplementedError


class Merging(Evicted):
    """Goes into the tokens that stay."""

    def held_bytes(self, layer: "HeadSizes", evicts: bool) -> int:
        memory = self.start(1, layer.kv_heads, torch.device("meta"))
        return sum(tensor.numel() * tensor.element_size() for tensor in memory.values())

    def start(self, batch: int, kv_heads: int, device: torch.device) -> State:
        """What a layer remembers beside its slots: tensors whose first axis is the batch."""
        return {}

    def absorb(self, memory: State, leaving: Departure) -> None:
        """Change those that stay by those that leave, and the memory, in place."""
        raise NotImplementedError


def minimum(a: Count, b: Count) -> Count:
    """The smaller of two counts, row by row if either is per row."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))
    return min(a, b)


def at_least_zero(count: Count) -> Count:
    """A count, or 0 where it is negative."""
    return count.clamp(min=0) if isinstance(count, Tensor) else max(count, 0)


def half(budget: Count) -> Count:
    """Half of a budget, rounded down: the default recent window of H2O, Scissorhands and RoCo."""
    return budget // 2
