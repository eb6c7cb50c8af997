"""The evidence of policies: attention weights, moments of queries, a repeated prompt, queries.

A score sees the attention weights of some queries. One that looks ahead sees the moments of a
text's queries before RoPE. One that asks which tokens a repetition of the prompt needs sees the
prompt once more. What repairs kept tokens sees queries of the prompt that is being cut. Beside any
of these, a part may see how the attention's output is projected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from kvtool.lazy_torch import Tensor
from kvtool.maths.pairs import pair_count, pair_lengths
from kvtool.maths.projection import projected_lengths
from kvtool.policies.numbers import HeadSizes

if TYPE_CHECKING:
    from kvtool.maths.rotation import Rotation
    from kvtool.policies.numbers import Count


@dataclass(frozen=True)
class AttentionRows:
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
        """Count the slots that these rows reach."""
        return self.weights.shape[-1]

    def group_mean(self) -> Tensor:
        """Average the weights over the query heads of a group: (batch, kv_heads, rows, slots)."""
        return self.weights.mean(2)

    def summed(self, vote_weights: Tensor) -> AttentionRows:
        """Sum the rows into one, each times its weight, (batch or 1, rows)."""
        weights = self.weights * vote_weights[:, None, None, :, None]
        return AttentionRows(weights.sum(3, keepdim=True))


def asked(rows: AttentionRows | None) -> AttentionRows:
    """Return the rows that `importance` was given; one with LAST_ROWS is always given them."""
    if rows is None:
        raise ValueError("this score has LAST_ROWS as its evidence, and was given none")
    return rows


_NUMBER = 4  # bytes of a number


@dataclass(frozen=True)
class MomentsAsked:
    """What a score wants of the queries.

    Args:
        sinks: number of first tokens whose queries are left out.
        covariance: whether their covariance is wanted beside their mean.
        lengths: whether the mean length of each of their pairs is wanted, too.
        stats: a file of means that takes the place of the prompt's own; None: none.
    """

    sinks: int = 0
    covariance: bool = True
    lengths: bool = False
    stats: str | None = None

    def held_bytes(self, layer: HeadSizes, *, reading: bool = False) -> int:
        """Count the bytes of them beside the slots, for one batch entry of a layer.

        Args:
            reading: while a prompt is read, before the covariance is rounded.
        """
        dim, codes = layer.key_dim, 0
        numbers = 1 + dim
        if self.covariance and reading:
            numbers += dim**2
        elif self.covariance:
            numbers, codes = numbers + dim, dim * (dim - 1) // 2  # variances, and correlations
        if self.lengths:
            numbers += pair_count(dim)
        return layer.heads * (numbers * _NUMBER + codes)


@dataclass(frozen=True)
class QueryMoments:
    """The moments of the queries of each query head, before RoPE or as it will rotate them.

    Attributes:
        mean: (batch, heads, head_dim) float32.
        covariance: (batch, heads, head_dim, head_dim) float32; None where it was not asked for.
        scale: what the layer multiplies its logits by.
        rotation: how the layer rotates queries and keys; None: it does not.
        lengths: (batch, heads, pairs) float32, the mean length of each pair of numbers, as
            `pair_lengths` orders them; None where it was not asked for.
    """

    mean: Tensor
    covariance: Tensor | None
    scale: float
    rotation: Rotation | None = None
    lengths: Tensor | None = None

    def pair_lengths(self, states: Tensor) -> Tensor:
        """Measure the pairs of keys or queries, (.., head_dim) to (.., pairs) float32."""
        return pair_lengths(states) if self.rotation is None else self.rotation.lengths(states)

    def mean_ahead(self, start: Count, distances: Sequence[int]) -> Tensor:
        """Rotate the mean by the average of the rotations to some positions.

        Args:
            start: the position from which they are counted.
            distances: of the positions from it.

        Returns:
            (batch, heads, head_dim) float32.
        """
        if self.rotation is None:
            return self.mean
        turns = self.rotation.rotation_ahead(start, distances)
        return self.rotation.rotate(self.mean[:, :, None], turns)[:, :, 0]

    def ahead(self, start: Count, count: int) -> QueryMoments:
        """Rotate them by the mean rotation R of `count` positions in a row: R m and R C R^T.

        Args:
            start: the first of the positions.
        """
        rotation, covariance = self.rotation, self.covariance
        if rotation is None:
            return self
        turns = rotation.mean_rotation(start, count)
        mean = rotation.rotate(self.mean[:, :, None], turns)[:, :, 0]
        if covariance is not None:
            covariance = rotation.rotate(covariance, turns).transpose(2, 3)
            covariance = rotation.rotate(covariance, turns)
        return replace(self, mean=mean, covariance=covariance)


@dataclass(frozen=True)
class QueryCentres:
    """The centres of a layer's queries before RoPE, in all processes together.

    Attributes:
        mean: (heads, head_dim) float32.
        lengths: (heads, pairs) float32, the mean lengths of their pairs.
    """

    mean: Tensor
    lengths: Tensor


_FIRST = "\n\nRepeat the previous context exactly."
_LATER = "\n\nRepeat the part of the previous context exactly, starting with"


@dataclass(frozen=True)
class RepetitionAsked:
    """What a score wants the model to repeat.

    Args:
        chunk: tokens that are repeated at a time.
        sinks: number of first tokens that are not repeated; they are attended to beside every
            chunk.
        instruction: the text that asks the model to repeat; None: KVzip's words.
        lead: tokens of the chunk before that are put before those of a chunk.
        by_output: whether a weight is multiplied by the length of what the output projection makes
            of its value, and divided by that of the hidden state which enters the attention.
        block: tokens that are read, repeated and cut at a time where blocks are asked for.
        least_block: tokens of a block from which on answers were as good.
    """

    chunk: int = 2048
    sinks: int = 0
    instruction: str | None = None
    lead: int = 8
    by_output: bool = False
    block: int = 512
    least_block: int = 256

    @property
    def first(self) -> str:
        """Return what is said before the first chunk."""
        return _FIRST if self.instruction is None else self.instruction

    @property
    def later(self) -> str:
        """Return what is said before every other chunk."""
        return _LATER if self.instruction is None else self.instruction


@dataclass(frozen=True)
class Repeated:
    """What the slots have received while the model repeated their prompt.

    Attributes:
        weights: (batch, kv_heads, slots) float32, the highest weight on each slot in the pass that
            repeated it; 0 where none did.
        tokens: bool (batch, kv_heads, slots), the slots that some pass has repeated.
    """

    weights: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class PromptQueries:
    """Queries of a prompt that is being cut, and how they attend.

    Attributes:
        query: (batch, heads, rows, head_dim), after RoPE.
        positions: (batch, rows) int64 of their tokens, -1 = none.
        scale, softcap: as for `kvtool.maths.attention.attention_weights`.
        sinks: (kv_heads, group) logits that the model has learned; None: it has none.
        spans: (batch, rows, 2) as for `kvtool.maths.attention.visible_keys`; None: there are none.
        slots: (batch, kv_heads, slots) positions of the keys before the cut, -1 = empty; None until
            it comes.
    """

    query: Tensor
    positions: Tensor
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    spans: Tensor | None = None
    slots: Tensor | None = None


@dataclass(frozen=True)
class OutputProjection:
    """The linear layer that takes the output of all query heads held here.

    Attributes:
        weight: (hidden_size, heads * value_dim), the columns of one head beside those of the next.
        heads: (batch,) int64, the KV head of each entry of the batch where it is one head alone, of
            `kv_heads`; None: an entry has all heads.
        kv_heads: that read by these columns.
    """

    weight: Tensor
    heads: Tensor | None = None
    kv_heads: int = 1

    def lengths(self, values: Tensor, norm: Literal[1, 2]) -> Tensor:
        """Measure each value as a query head's columns project it.

        Args:
            values: (batch, kv_heads, slots, value_dim).
            norm: 1 sums absolute values, 2 is Euclidean.

        Returns:
            (batch, kv_heads, group, slots) float32.
        """
        if self.heads is None:
            return projected_lengths(values, self.weight, norm)
        weight = self.weight.unflatten(1, (self.kv_heads, -1))[:, self.heads].flatten(1)
        return projected_lengths(values.transpose(0, 1), weight, norm).transpose(0, 1)
