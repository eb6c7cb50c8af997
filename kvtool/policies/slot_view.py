"""The view that a policy is shown: slots of a layer, and the evidence that it asks for."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvtool.lazy_torch import Tensor
from kvtool.policies.numbers import KVHeads, all_here

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtool.policies.evidence import OutputProjection, QueryMoments, Repeated
    from kvtool.policies.numbers import Count


class Evidence(enum.Enum):
    """Evidence that a score wants of every block: keys, queries, attention rows, sums, logits."""

    NOTHING = "nothing"
    KEYS = "keys"  # those of all slots, as `view.keys`
    QUERIES = "queries"  # the newest `window` of them, as `view.queries`, and all keys
    MOMENTS = "moments"  # of a prompt's queries before RoPE, as `view.moments`, and all keys
    REPETITION = "repetition"  # rows of a prompt said once more, as `view.repeated`
    LAST_ROWS = "last rows"  # the last `window` queries, once the block is attended
    ALL_ROWS = "all rows"  # every query, in chunks, while the block is attended
    COLUMNS = "columns"  # sums over every query: statistics named as in `kvtool.maths.columns`
    LOGITS = "logits"  # each token's surprisal, as `state["surprisal"]`

    @property
    def shows_keys(self) -> bool:
        """Return whether `view.keys` is filled."""
        return self in (Evidence.KEYS, Evidence.QUERIES, Evidence.MOMENTS)

    @property
    def comes_later(self) -> bool:
        """Return whether it comes when a prompt has been stored, which is cut then."""
        return self is Evidence.REPETITION


class NewestQueries(Protocol):
    """The queries of the newest tokens of a layer.

    Attributes:
        scale, softcap: as for `kvtool.maths.attention.attention_weights`.
        positions: (batch, rows) int64 of them, -1 where there was none yet.
    """

    @property
    def scale(self) -> float: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def positions(self) -> Tensor | None: ...

    def sinks_by_kv_head(self, kv_heads: int) -> Tensor | None:
        """Return logits without a key, (kv_heads, group) or (batch, kv_heads, group)."""

    def by_kv_head(self, kv_heads: int) -> tuple[Tensor, Tensor]:
        """Return queries after RoPE, (batch, kv_heads, group, rows, head_dim), and which there are.

        The latter is bool (batch, rows).
        """


@dataclass(frozen=True)
class SlotView:
    """The slots of one layer as a policy sees them, the running block included. Read only.

    While decoding, one view may cover several layers, stacked along the batch. Where slots hold
    codes, keys and values of a layer are decoded each time that they are looked at.

    Attributes:
        values: (batch, kv_heads, slots, value_dim) of each layer.
        positions: (batch, kv_heads, slots), the true position of each token, -1 = empty; unordered.
        tokens_seen: tokens of the sequence so far, the running block included.
        budget: slots the sequence may keep in each head; the mean where heads differ.
        held: slots of the sequence that are not empty; where heads differ, of each head.
        layer: index of the layer, one number or one per sequence.
        block: tokens of the sequence in the running block.
        heads: all KV heads of the layer; a process may hold a part of them.
        kept_in_parent: which slots hold tokens that the layer above keeps, bool (batch, 1, slots),
            for a score whose layers are nested; None: no layer is above.
        first_layer_budget: what the first layer may keep, for such a score.
        keys: (batch, kv_heads, slots, key_dim) of each layer, as they are stored, for a score that
            needs keys; else none.
        queries: of the newest tokens of each layer, for a score that looks back from them.
        moments: of the queries of the text's prompts, of each layer, for a score that uses them.
        repeated: what slots have received while the prompt was repeated, for such a score.
        projections: what takes the output of the heads of each layer, for a part that looks at it.
        in_order: whether positions are known to ascend, and no slot to be empty.
    """

    values: Sequence[Tensor]
    positions: Tensor
    tokens_seen: Count
    budget: Count
    held: Count
    layer: Count = 0
    block: Count = 1
    heads: KVHeads = field(default_factory=all_here)
    kept_in_parent: Tensor | None = None
    first_layer_budget: Count | None = None
    keys: Sequence[Tensor] = ()
    queries: tuple[NewestQueries, ...] = ()
    moments: tuple[QueryMoments, ...] = ()
    repeated: Repeated | None = None
    projections: tuple[OutputProjection, ...] = ()
    in_order: bool = False

    @property
    def stored(self) -> Tensor | None:
        """Mark the slots that are not empty: bool (batch, kv_heads, slots); None: all."""
        return self.positions >= 0 if not isinstance(self.held, int) else None

    def recent(self, count: Count) -> Tensor:
        """Mark the newest `count` tokens: bool (batch, kv_heads, slots)."""
        return self.positions >= self.tokens_seen - count

    def sinks(self, count: Count) -> Tensor:
        """Mark the first `count` tokens, and empty slots: bool (batch, kv_heads, slots)."""
        return self.positions < count
