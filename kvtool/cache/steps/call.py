"""A call of the attention function: its arguments, and what a decoded token gives.

Transformers calls `Cache.update` and then the attention function, in the same forward and thread,
and passes nothing from the first to the second. So `update` leaves a pending step in its thread,
and the attention function takes it. The mask function finds its layer in the same way, set by
`get_mask_sizes`, which runs right before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.steps.block import KnownColumns
from kvtool.cache.steps.grouped import LayerGroup
from kvtool.errors import KvtoolError
from kvtool.policies.evidence import AttentionRows
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

    def after(self, tokens: int) -> Placement:
        """The same for the new tokens without the first ones."""
        return replace(self, start=self.start + tokens)

    def of(self, choose: Callable[[Tensor], Tensor]) -> Placement:
        """The same for other batch entries, which `choose` brings about."""
        return replace(self, start=choose(self.start)) if isinstance(self.start, Tensor) else self


class Unstored(Protocol):
    """Who attends the tokens of a forward that are not stored."""

    def attend(self, layer: SlotLayer, call: Call) -> Tensor:
        """Attend them: (batch, heads, q_len, value_dim)."""


@dataclass(frozen=True)
class StepContext:
    """What a forward is like for one layer.

    Attributes:
        kernel: what runs where weights are not asked for: `sdpa`, `eager` (the weights after all)
            or `flash_attention_2`, for blocks without padding; anything else means `sdpa`.
        block: queries per block of a prompt; None: one block.
        last: whether the prompt ends with this block, for policies that cut it once.
        placement: where the model has placed the new tokens, where a layer places them anew.
        group: the layers that this one decides with; None: it decides alone.
        notify: whether the cache wants to know when the step has run.
        shares_kv: whether later layers read the keys and values of this one.
        norms: takes the log-sum-exp of a whole prompt's rows, (batch, heads, q_len) float32, where
            a kernel can return it; None: not asked for.
        unstored: attends tokens that are not stored; None: they are.
        hidden: (batch, q_len, hidden_size), what has entered the attention; None: not asked for.
    """

    kernel: str = "sdpa"
    block: int | None = None
    last: bool = True
    placement: Placement | None = None
    group: LayerGroup | None = None
    notify: bool = True
    shares_kv: bool = False
    norms: list[Tensor] | None = None
    unstored: Unstored | None = None
    hidden: Tensor | None = None

    def shown_hidden(self) -> Tensor:
        """Return the hidden states (KvtoolError: no attached forward has brought them)."""
        if self.hidden is None:
            raise KvtoolError(
                "the model has shown no hidden states to this cache",
                hint="attach it, build the cache anew and feed it by the model's own forward",
            )
        return self.hidden


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
        scale, softcap, sinks: as for `attention_weights`.
        context: what the forward is like; no default, which torch 2.11 cannot compile.
        mask: what a caller wants queries to see, in place of all tokens before them: bool, or float
            to be added, (batch or 1, heads or 1, q_len or 1, keys), keys as they came. None: the
            caller has no wish.
        attended: (batch, heads, q_len, value_dim), the output of a block of a prompt, where it is
            known already; None: it is not.
        columns: what other caches have summed of this attention; None: no other attends to it.
        place_keys: returns keys of some slots, given with their slice, where they are attended by a
            decoded token; None: they are stored there.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    raw_key: Tensor
    raw_value: Tensor
    positions: Tensor | None
    scale: float
    context: StepContext
    softcap: float | None = None
    sinks: Tensor | None = None
    spans: Tensor | None = None
    mask: Tensor | None = None
    attended: Tensor | None = None
    columns: KnownColumns | None = None
    place_keys: Callable[[Tensor, slice], Tensor] | None = None

    @property
    def q_len(self) -> int:
        """New tokens."""
        return self.query.shape[2]

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
        chosen: whether the slot that the next token takes is chosen already.
    """

    out: Tensor
    lse: Tensor | None = None
    rows: AttentionRows | None = None
    counted: bool = False
    chosen: bool = False


IMPLEMENTATION = "kvtool"  # what attention and masks are called in transformers' registries

_LOCAL = threading.local()


@dataclass(frozen=True)
class PendingStep:
    """What `update` has taken in and no call has attended yet.

    Attributes:
        owner: the `kvtool.cache.whole.cache.KVCache` of the layer.
        raw_key, raw_value: kept slots and new tokens, as `update` returned them.
        new_key, new_value: the new tokens alone.
        decoding: whether they are one decoded token.
    """

    owner: Any
    layer: SlotLayer
    raw_key: Tensor
    raw_value: Tensor
    new_key: Tensor
    new_value: Tensor
    decoding: bool
    context: StepContext


class MaskTarget(NamedTuple):
    """The layer that a mask is made for.

    Attributes:
        decoding: whether a token is being decoded.
        anew: whether the caller's mask hides or shows tokens that were read before.
    """

    layer: SlotLayer
    decoding: bool
    anew: bool = False


def set_pending(step: PendingStep) -> None:
    """Leave a step for the attention call that follows in this thread."""
    _LOCAL.step = step


def forget_pending() -> None:
    """Drop a step that a broken-off forward has left in this thread."""
    _LOCAL.step = None


def take_pending(keys: int) -> PendingStep | None:
    """Take the pending step, if it is about that many keys."""
    step: PendingStep | None = getattr(_LOCAL, "step", None)
    _LOCAL.step = None
    return None if step is None or keys != step.raw_key.shape[2] else step


def check_attended(layer: SlotLayer) -> None:
    """Refuse a block whose predecessor was never attended: the model runs another attention."""
    if layer.unattended:
        raise KvtoolError(
            "the model does not run kvtool's attention, so this cache cannot work",
            hint="call kvtool.attach(model) first",
        )


def set_mask_target(target: MaskTarget) -> None:
    """Set for the mask function of this thread which layer it is called for, and for what."""
    _LOCAL.mask = target


def take_mask_target() -> MaskTarget | None:
    """Take the target of the mask being made; it is there once."""
    target: MaskTarget | None = getattr(_LOCAL, "mask", None)
    _LOCAL.mask = None
    return target
