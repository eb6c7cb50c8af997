"""The ways to run a model in a memory that a plan lists: what each keeps, takes and costs."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from kvtool.documents.document import Section, TokenCount

Prefill = Literal["block", "full"]

WayKind = Literal["bits", "bits and eviction", "eviction", "reading"]
"""Everything in fewer bits, some tokens in fewer bits, some tokens, or all read sparsely."""

KINDS: tuple[WayKind, ...] = get_args(WayKind)


class Peaks(Section):
    """Bytes that live at a time, estimated: with a prompt that is read in blocks, or at once."""

    block: NonNegativeInt
    full: NonNegativeInt


class WayLoss(Section):
    """The share of the full cache's right answers that is expected to be lost.

    Attributes:
        known: where the question is in the prompt; None: not measured.
        later: where it is asked after the prompt was compressed; None: not measured.
    """

    known: NonNegativeFloat | None = None
    later: NonNegativeFloat | None = None

    @property
    def worse(self) -> float:
        """The larger of the two."""
        return max(self.known or 0.0, self.later or 0.0)


class Way(Section):
    """One way to run the plan's model.

    Attributes:
        tokens: kept of the prompt, per layer and KV head.
        share: of the prompt that is kept.
        key_bits, value_bits: of a channel.
        reads: pairs that a step reads per layer and KV head, where that is the budget.
        bytes: held, the policy's own numbers included.
        share_of_full: bytes as a share of the keys and values of a full cache.
        traffic: bytes that a token reads.
        peak: with `--memory` the weights are part of it.
        prefill: how the command reads the prompt, which has the smaller peak.
        excess: bytes by which it does not fit.
        command: runs it; without a prompt of its own.
    """

    policy: str
    kind: WayKind
    tokens: TokenCount
    share: NonNegativeFloat
    key_bits: PositiveInt
    value_bits: PositiveInt
    reads: PositiveInt | None = None
    bytes: NonNegativeInt
    share_of_full: NonNegativeFloat
    traffic: NonNegativeInt
    peak: Peaks
    prefill: Prefill
    loss: WayLoss
    fits: bool
    excess: NonNegativeInt = 0
    command: str

    @model_serializer(mode="wrap")
    def _given(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found = serialize(self)
        if self.reads is None:
            found.pop("reads", None)  # which the caller may have left out already
        return found

    @property
    def peak_bytes(self) -> int:
        """The peak of the command."""
        return self.peak.block if self.prefill == "block" else self.peak.full


class Device(Section):
    """A device that a plan is for: its memory, and the weights in it, in bytes."""

    memory: PositiveInt
    weights: NonNegativeInt
