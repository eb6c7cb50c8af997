"""The rotation by which a model places its keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.maths.rotation import cosines_and_sines, mean_cosines_and_sines, rope_shift

if TYPE_CHECKING:
    from torch import Tensor


class Rotation:
    """The rotation of a layer's keys and queries."""

    def __init__(self, frequencies: Tensor, interleaved: bool) -> None:
        """Take what defines it.

        Args:
            frequencies: (pairs,) float32, radians a position.
            interleaved: whether the numbers of a pair are neighbours.
        """
        self.frequencies, self.interleaved = frequencies, interleaved

    def __deepcopy__(self, memo: dict) -> Rotation:
        return self  # what it computes never changes

    def shift(self, states: Tensor, by: Tensor) -> Tensor:
        """Turn keys or queries on.

        Args:
            states: (batch, heads, tokens, head_dim), after RoPE.
            by: (batch, heads or 1, tokens) float32, whole positions, signed.
        """
        rotations = cosines_and_sines(by, self.frequencies)
        return rope_shift(states, rotations, interleaved=self.interleaved)

    def mean_rotation(self, start: int | Tensor, count: int) -> Tensor:
        """Average the turns to `count` positions in a row, for `rotate`.

        Args:
            start: the first position, one or (batch, 1, 1).

        Returns:
            (batch or 1, 1, 1, 2 * pairs) float32.
        """
        import torch

        first = torch.as_tensor(start, device=self.frequencies.device).view(-1, 1, 1)
        return mean_cosines_and_sines(first, count, self.frequencies)

    def rotate(self, states: Tensor, rotations: Tensor) -> Tensor:
        """Turn vectors by cosines and sines, which may be averages.

        Args:
            states: (batch, heads, vectors, head_dim).
            rotations: (batch or 1, 1, 1, 2 * pairs) float32.
        """
        return rope_shift(states, rotations, interleaved=self.interleaved)
