"""RoPE whose factors depend on the length of the text: for which length a cache has chosen them.

Such a model rotates short texts by one set of factors and long texts by another (longrope), or by a
base that grows with the text (dynamic NTK). It chooses anew in every forward. Keys in a cache are
rotated already, so a text that is read in several forwards would mix the factors. A cache therefore
chooses them once for each batch entry, for the length that the whole text will have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LengthRope:
    """How the factors of a model's RoPE depend on the length of the text.

    Attributes:
        thresholds: ascending; up to each of these lengths the same factors hold.
        grows: whether every length above the last threshold has factors of its own; else all of
            them share one set.
    """

    thresholds: tuple[int, ...]
    grows: bool

    def factors_for(self, length: int) -> int:
        """Return one length for all lengths with the factors of this one."""
        for threshold in self.thresholds:
            if length <= threshold:
                return threshold
        return length if self.grows else self.thresholds[-1] + 1

    def serve(self, factors: int, length: int) -> bool:
        """Return whether the factors of one length can read a text that has come to another."""
        longest = self.longest(factors)
        return longest is None or length <= longest

    def longest(self, factors: int) -> int | None:
        """Return the longest text that the factors of one length serve; None: any."""
        return factors if self.grows or factors in self.thresholds else None


@dataclass(frozen=True)
class RopeChoice:
    """What a cache knows of its factors.

    Attributes:
        chosen: for which lengths they were chosen; None: they have not been, or do not depend on
            the length.
        expected: tokens that the whole text will have at least, as far as is known.
        serves: tokens, with padding, up to which they are known to serve all batch entries.
    """

    chosen: RopeLengths | None = None
    expected: int = 0
    serves: int = 0


@dataclass(frozen=True)
class RopeLengths:
    """The lengths for which the factors of a cache were chosen.

    Attributes:
        lengths: one for each batch entry, or one for all; as `LengthRope.factors_for` returns them.
    """

    lengths: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> RopeLengths:
        """Note one length for each batch entry, or a single one where all are equal."""
        return cls(tuple(lengths[:1] if len(set(lengths)) == 1 else lengths))

    def of_entries(self, batch: int) -> list[int]:
        """Return the length of each batch entry."""
        return list(self.lengths) * batch if len(self.lengths) == 1 else list(self.lengths)

    def reindexed(self, change: Callable[[Tensor], Tensor]) -> RopeLengths:
        """Follow the batch entries that transformers reorders, repeats or selects."""
        if len(self.lengths) == 1:
            return self
        return RopeLengths.of(change(torch.tensor(self.lengths)).tolist())
