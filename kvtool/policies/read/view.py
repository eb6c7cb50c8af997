"""The view that a reader is shown, and its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvtool.lazy_torch import Tensor
from kvtool.policies.numbers import State


def fixed(size: int | None) -> int:
    """Return a size of a reader that `sized` has given all its sizes."""
    if size is None:
        raise ValueError("a reader chooses once all its sizes are fixed: see `Read.sized`")
    return size


class Stages(Protocol):
    """What RocketKV's plan says of stage 2; see `kvtool.planning.rocketkv_stages`."""

    @property
    def page_size(self) -> int: ...

    @property
    def head_dims(self) -> int: ...

    @property
    def top_k(self) -> int: ...


@dataclass(frozen=True)
class StepBudget:
    """What a decode step may read of a sequence, in pairs of key and value per KV head.

    Attributes:
        pairs: t.
        tokens: stored at the end of the prompt, at least 1.
        head_dim: channels of a key.
        stages: RocketKV's plan, for a reader that is `planned`.
    """

    pairs: int
    tokens: int
    head_dim: int
    stages: Stages | None = None


@dataclass(frozen=True)
class Stored:
    """Sequences of one layer that tables are made of.

    Attributes:
        keys: (batch, kv_heads, tokens, head_dim), after RoPE.
        values: (batch, kv_heads, tokens, value_dim).
        prompt: how many of the tokens, the first ones, were there when the prompt ended.
        basis: (kv_heads, head_dim, head_dim) of the layer, from the reader's file; None: no file.
    """

    keys: Tensor
    values: Tensor
    prompt: int
    basis: Tensor | None = None


@dataclass(frozen=True)
class ReadView:
    """Sequences of one layer as a reader sees them at a decode step, with the new token. Read only.

    Attributes:
        query: (batch, kv_heads, group, head_dim), after RoPE.
        keys: (batch, kv_heads, tokens, head_dim), in the order in which tables know them.
        tables: the reader's own; the last axis may be longer than what is in use.
        tokens: how many there are to choose from.
        scale, softcap, sinks: as for `kvtool.maths.attention.attention_weights`.
    """

    query: Tensor
    keys: Tensor
    tables: State
    tokens: int
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class Choice:
    """What a decode step attends to.

    Attributes:
        slots: (batch, kv_heads, chosen) int64 indices of tokens, or (batch, kv_heads, group,
            chosen) where every query head has its own; in any order. None: all.
        estimate: numbers that were read to choose, per sequence and KV head; a pair of key and
            value has `head_dim` + `value_dim` of them.
        weight: (batch, kv_heads, group) float32, the part of the output that the chosen tokens make
            up; None: all of it.
        rest: (batch, kv_heads, value_dim) float32, what the other part is.
    """

    slots: Tensor | None
    estimate: int = 0
    weight: Tensor | None = None
    rest: Tensor | None = None
