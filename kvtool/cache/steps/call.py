"""One call of the attention function: what a step is given, and what comes of a decoded token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from kvtool.cache.steps.grouped import LayerGroup
from kvtool.cache.steps.known_columns import KnownColumns
from kvtool.cache.steps.row_norms import RowNorms
from kvtool.cache.storage.layer import SlotLayer
from kvtool.cache.storage.repetition import RepeatedWeights
from kvtool.policies.attention_rows import AttentionRows
from kvtool.policies.numbers import Count


@dataclass(frozen=True)
class Placement:
    """Position ids that the model has given to the new tokens of a forward.

    Attributes:
        seen: tokens that the cache had seen before, padding included; None in a static step.
        start: position id of the first one, of all batch entries or (batch,); the next ones follow,
            padding left out.
        end: no position id of theirs, nor of a token before, is as large as this.
    """

    seen: int | None
    start: Count
    end: int

    def follows(self, layer: SlotLayer) -> bool:
        """Whether the forward is the one that comes next to a layer."""
        return layer.seen_device is not None or self.seen == layer.seen

    def after(self, tokens: int) -> Placement:
        """The same for the new tokens without the first ones."""
        return replace(self, start=self.start + tokens)

    def of(self, choose: Callable[[Tensor], Tensor]) -> Placement:
        """The same for other batch entries, which `choose` brings about."""
        return replace(self, start=choose(self.start)) if isinstance(self.start, Tensor) else self


@dataclass(frozen=True)
class StepContext:
    """What a forward is like for one layer.

    Attributes:
        kernel: what runs where nobody asks for weights: `sdpa`, `eager` (the weights after all) or
            `flash_attention_2`, for blocks without padding; anything else means `sdpa`.
        block: queries per block of a prompt; None: one block.
        last: whether the prompt ends with this block, for policies that cut it once.
        placement: where the model has placed the new tokens, where a layer places them anew.
        group: the layers that this one decides with; None: it decides alone.
        notify: whether the cache wants to know when the step has run.
        shares_kv: whether later layers read the keys and values of this one.
        norms: takes the log-sum-exp of a whole prompt's rows, where they can be told; None: nobody
            asks.
        repeats: notes the weights of tokens that repeat the prompt and are not stored; None: they
            are.
    """

    kernel: str = "sdpa"
    block: int | None = None
    last: bool = True
    placement: Placement | None = None
    group: LayerGroup | None = None
    notify: bool = True
    shares_kv: bool = False
    norms: RowNorms | None = None
    repeats: RepeatedWeights | None = None


@dataclass(frozen=True)
class Call:
    """One call of the attention function.

    Attributes:
        query: (batch, heads, q_len, head_dim), after RoPE.
        key, value: (batch, heads of the attention, kept + q_len, dim): what the layer's `update`
            returned, which models with latent attention have expanded to all their heads since.
        raw_key, raw_value: what `update` returned, as it is stored.
        positions: (batch, q_len) int64 true position of each new token, -1 = padding; None where
            nothing is padded.
        spans: (batch, q_len, 2) int64 positions of the first and the last new token that a query
            sees, beside those before it: images are seen from both sides; None: none.
        scale, softcap, sinks: as for `attention_weights`; the sinks of a whole layer as (heads,).
        context: what the forward is like.
        mask: what a caller wants queries to see, in place of all tokens before them: bool, or float
            to be added, (batch or 1, heads or 1, q_len or 1, keys), keys as they came; None: he has
            no wish.
        attended: (batch, heads, q_len, value_dim), the output of a block of a prompt, where it is
            known already; None: it is not.
        columns: what other caches have summed of this attention; None: no other attends to it.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    raw_key: Tensor
    raw_value: Tensor
    positions: Tensor | None
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    spans: Tensor | None = None
    context: StepContext = StepContext()
    mask: Tensor | None = None
    attended: Tensor | None = None
    columns: KnownColumns | None = None

    @property
    def q_len(self) -> int:
        """New tokens."""
        return self.query.shape[2]

    @property
    def latent(self) -> bool:
        """Whether keys are attended in another form than they are stored in."""
        return self.key is not self.raw_key

    @property
    def needs_weights(self) -> bool:
        """Whether no fused kernel can run this call."""
        eager = self.context.kernel == "eager"
        return eager or self.softcap is not None or self.sinks is not None


@dataclass(frozen=True)
class AttendedToken:
    """What came of attending the slots by a decoded token.

    Attributes:
        out: (batch, heads, 1, value_dim).
        lse: the log-sum-exp (batch, heads of the attention, group, 1), if it is needed.
        rows: the weights, if the policy wants them.
        counted: whether they are in the numbers beside the slots already.
    """

    out: Tensor
    lse: Tensor | None = None
    rows: AttentionRows | None = None
    counted: bool = False
