"""What a reader is: it looks at some of the stored tokens at every decode step, and drops none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from kvtool.errors import UsageError
from kvtool.policies.parts import State


class Stages(Protocol):
    """What RocketKV's plan says of stage 2; see `kvtool.planning.rocketkv`."""

    page_size: int
    head_dims: int
    top_k: int


@dataclass(frozen=True)
class StepBudget:
    """What a decode step may read of a row, in pairs of key and value per KV head.

    Attributes:
        pairs: t.
        tokens: stored at the end of the prompt.
        head_dim: channels of a key.
        stages: RocketKV's plan, for a reader that is `planned`.
    """

    pairs: int
    tokens: int
    head_dim: int
    stages: Stages | None = None


@dataclass(frozen=True)
class Stored:
    """Rows of one layer that tables are made of.

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
    """Rows of one layer as a reader sees them at a decode step, the new token included. Read only.

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
        estimate: numbers that were read to choose, per row and KV head; a pair of key and value has
            `head_dim` + `value_dim` of them.
        share: (batch, kv_heads, group) float32, the part of the output that the chosen tokens make
            up; None: all of it.
        rest: (batch, kv_heads, value_dim) float32, what the other part is.
    """

    slots: Tensor | None
    estimate: int = 0
    share: Tensor | None = None
    rest: Tensor | None = None


class Read:
    """Which of the stored tokens a decode step looks at; nothing leaves the cache by it.

    Tables are numbers beside the slots that make the choice cheap. They are made once, at the end
    of a prompt, and every new token is added in place.

    Attributes:
        name: as typed in a policy string.
        paper: where it comes from.
        share: a step attends to the budget divided by this; the rest of it pays for choosing.
        planned: whether sizes come from RocketKV's plan.
        k: tokens to attend to; None: from the budget.
        skip_layers: so many first layers read all that they store.
        basis: a file of key bases for `start`; None: none.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    share: ClassVar[int] = 2
    planned: ClassVar[bool] = False
    k: int | None = None
    skip_layers: int = 0
    basis: str | None = None

    @property
    def least(self) -> int:
        """The smallest budget, in pairs of key and value."""
        return self.share

    def sized(self, step: StepBudget) -> Read:
        """The same reader with every size that was left open."""
        raise NotImplementedError

    def start(self, stored: Stored) -> State:
        """Make the tables of what is stored, (batch, ...) each."""
        return {}

    def columns(self, tokens: int) -> Mapping[str, int]:
        """Length of the last axis of the tables that grow, for so many tokens."""
        return {}

    def append(self, tables: State, key: Tensor, value: Tensor, at: int) -> None:
        """Add token number `at` to the tables, in place; there is room for it.

        Args:
            key: (batch, kv_heads, head_dim).
            value: (batch, kv_heads, value_dim).
        """

    def choose(self, view: ReadView) -> Choice:
        """The tokens to attend to; there are more of them than the budget."""
        raise NotImplementedError


def check_sizes(reader: Read, least: Mapping[str, int]) -> None:
    """Refuse sizes that are given and too small.

    Args:
        least: the smallest value of each parameter.

    Raises:
        UsageError: the first such parameter.
    """
    for name, limit in least.items():
        value = getattr(reader, name)
        if value is not None and value < limit:
            raise UsageError(f"{reader.name}: {name} must be {limit} or more, got {value}")
