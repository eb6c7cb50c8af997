"""Rotary position embedding: rotate keys and queries on by whole positions.

Su et al., 2021, https://arxiv.org/abs/2104.09864, section 3.4. A head consists of pairs of numbers,
and pair i of a token at position p is rotated by the angle p * frequency i. Rotation is additive: a
key rotated to p and then by d is the key rotated to p + d. Models lay pairs out in two ways, number
i beside number i + pairs (half-split) or numbers 2i and 2i + 1 (interleaved); the numbers behind
the pairs have no position. `Rotation` describes how a model places its keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtool.maths.pairs import pair_lengths


def cosines_and_sines(shifts: Tensor, frequencies: Tensor) -> Tensor:
    """Compute cosines and sines of shifts.

    Args:
        shifts: (..) positions, signed.
        frequencies: (pairs,) float32, radians a position.

    Returns:
        (.., 2 * pairs) float32: cosines, then sines.
    """
    angles = shifts.float()[..., None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


def mean_cosines_and_sines(start: Tensor, count: int, frequencies: Tensor) -> Tensor:
    """Average cosines and sines over the rotations to `count` positions in a row.

    The sum of exp(i p f) over p = start .. start + count - 1 is Dirichlet's kernel,
    exp(i f (start + (count - 1) / 2)) sin(count f / 2) / sin(f / 2), for any count at one price.

    Args:
        start: (..) first positions.
        frequencies: (pairs,) float32, radians a position.

    Returns:
        (.., 2 * pairs) float32: cosines, then sines.
    """
    half = frequencies.double() / 2
    still = half.sin() == 0
    length = (count * half).sin() / (count * half.sin()).masked_fill(still, 1)
    length = length.masked_fill(still, 1)
    middle = (start.double() + (count - 1) / 2)[..., None] * (2 * half)
    return torch.cat([length * middle.cos(), length * middle.sin()], -1).float()


def rope_shift(states: Tensor, shifts: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate every pair of keys or queries.

    Args:
        states: (batch, heads, tokens, head_dim), after RoPE.
        shifts: (batch, heads or 1, tokens, 2 * pairs) float32 of `cosines_and_sines`; pairs come
            first in a head, 2 * pairs is at most head_dim.
        interleaved: whether the numbers of a pair are neighbours.

    Returns:
        A new tensor like `states`, computed in float32.
    """
    width = shifts.shape[-1]
    cosine, sine = shifts.chunk(2, -1)
    if interleaved:
        left, right = slice(0, width, 2), slice(1, width, 2)
    else:
        left, right = slice(0, width // 2), slice(width // 2, width)
    x, y = states[..., left].float(), states[..., right].float()
    shifted = torch.empty_like(states)
    shifted[..., left] = torch.addcmul(x * cosine, y, sine, value=-1)
    shifted[..., right] = torch.addcmul(y * cosine, x, sine)
    if width < states.shape[-1]:
        shifted[..., width:] = states[..., width:]
    return shifted


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
        """Rotate keys or queries on.

        Args:
            states: (batch, heads, tokens, head_dim), after RoPE.
            by: (batch, heads or 1, tokens) float32, whole positions, signed.
        """
        rotations = cosines_and_sines(by, self.frequencies)
        return rope_shift(states, rotations, interleaved=self.interleaved)

    def mean_rotation(self, start: int | Tensor, count: int) -> Tensor:
        """Average the rotations to `count` positions in a row, for `rotate`.

        Args:
            start: the first position, one or (batch, 1, 1).

        Returns:
            (batch or 1, 1, 1, 2 * pairs) float32.
        """
        first = torch.as_tensor(start, device=self.frequencies.device).view(-1, 1, 1)
        return mean_cosines_and_sines(first, count, self.frequencies)

    def rotation_ahead(self, start: int | Tensor, distances: Sequence[int]) -> Tensor:
        """Average the rotations to some positions, for `rotate`.

        Args:
            start: the position from which they are counted, one or (batch, 1, 1).
            distances: of the positions from it.

        Returns:
            (batch or 1, 1, 1, 2 * pairs) float32.
        """
        frequencies = self.frequencies.double()
        first = torch.as_tensor(start, device=frequencies.device).double().view(-1, 1, 1, 1)
        far = torch.tensor(distances, dtype=torch.float64).to(frequencies.device)
        angles = (first + far)[..., None] * frequencies
        return torch.cat([angles.cos().mean(3), angles.sin().mean(3)], -1).float()

    def lengths(self, states: Tensor) -> Tensor:
        """Measure every pair of keys or queries, those behind the rotated ones included.

        Args:
            states: (.., head_dim), before or after RoPE.

        Returns:
            (.., pairs) float32.
        """
        return pair_lengths(states, len(self.frequencies), interleaved=self.interleaved)

    def rotate(self, states: Tensor, rotations: Tensor) -> Tensor:
        """Rotate vectors by cosines and sines, which may be averages.

        Args:
            states: (batch, heads, vectors, head_dim).
            rotations: (batch or 1, 1, 1, 2 * pairs) float32.
        """
        return rope_shift(states, rotations, interleaved=self.interleaved)
