"""Numbers in 8 or 4 bits beside a scale in float16, and back: int8, fp8 (e4m3) and int4.

A scale is the largest magnitude of what shares it, over the largest code. It is rounded to float16
first, kept between that format's smallest normal and its largest number, and codes are made with
the rounded one. Zeros have scale 0 and codes of 0. Infinity gets the largest code, beside the
largest scale. A NaN makes its scale NaN, so that it comes back as NaN and is not hidden.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from kvtool.lazy_torch import Tensor, torch

GROUP = 32
"""Channels that share a scale in 4 bits."""

_INT8, _INT4, _FP8 = 127.0, 7.0, 448.0  # the largest codes
_ZERO = 8  # what a nibble holds of 0
FP8_SHIFT = 256.0
"""Exponents of float16 and of e4m3 differ by 15 - 7 = 8."""


def int8_codes(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Round vectors to 8 bits, half to even.

    >>> int8_codes(torch.tensor([1, -2, 3, .5]))
    (tensor([ 42, -85, 127,  21], dtype=torch.int8), tensor([0.0236], dtype=torch.float16))

    Args:
        numbers: (.., dim) floating point.

    Returns:
        (.., dim) int8 and (.., 1) float16.
    """
    numbers, scales = _scaled(numbers, _INT8)
    return numbers.round_().to(torch.int8), scales


def from_int8(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantise them, in float32."""
    return codes.float() * scales.float()


def fp8_codes(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Round vectors to floats of 8 bits, 4 of them exponent and 3 mantissa.

    Args:
        numbers: (.., dim) floating point.

    Returns:
        (.., dim) uint8, the bits of float8_e4m3fn, and (.., 1) float16.
    """
    numbers, scales = _scaled(numbers, _FP8)
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8), scales


def from_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantise them, in float32; no codes are NaN.

    The bits of e4m3, seven places up, are a float16 whose exponent is too small by 8.
    """
    bits = codes.view(torch.int8).short()  # the sign at the top, where float16 has it
    half = ((bits & -0x8000) | ((bits & 0x7F) << 7)).view(torch.float16)
    return half.float() * (scales.float() * FP8_SHIFT)


def int4_codes(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Round groups of channels to 4 bits, two to a byte.

    Args:
        numbers: (.., dim) floating point; `dim` is a multiple of `GROUP`.

    Returns:
        (.., dim / 2) uint8, with the first half of the channels in the low bits, and
        (.., dim / GROUP) float16.
    """
    grouped, scales = _scaled(numbers.unflatten(-1, (-1, GROUP)), _INT4)
    low, high = grouped.round_().add_(_ZERO).to(torch.uint8).flatten(-2).chunk(2, -1)
    return low | (high << 4), scales[..., 0]


def from_int4(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantise them, in float32."""
    numbers = torch.cat([codes & 15, codes >> 4], -1).float() - _ZERO
    grouped = numbers.unflatten(-1, (-1, GROUP))
    return (grouped * scales.float()[..., None]).flatten(-2)


def _scaled(numbers: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Divide by the scales of the last axis, float16 (.., 1), to magnitudes up to `largest`."""
    numbers = numbers.float()
    peak = torch.linalg.vector_norm(numbers, float("inf"), -1, keepdim=True)
    limits = torch.finfo(torch.float16)
    scales = (peak / largest).clamp_(limits.tiny, limits.max).half()
    scales.masked_fill_(peak == 0, 0)
    # zeros over their scale of 0 are NaN, as is what shares a scale with NaN
    return (numbers / scales.float()).clamp_(-largest, largest).nan_to_num_(0.0), scales


def lost_share(numbers: Tensor, rounded: Tensor) -> float:
    """Measure how much of most channels rounding loses: 0 for nothing, about 1 for all.

    A channel far larger than those that share its scale leaves them only few codes, or none. For
    each vector and each `GROUP` of channels the middle error is divided by the middle magnitude. Of
    each head the middle over the vectors counts, so that a few odd tokens do not. Of all heads and
    groups the largest counts.

    Args:
        numbers: (batch, heads, tokens, dim), at least one token.
        rounded: what rounding made of them.
    """
    width = numbers.shape[-1]
    width = width if width % GROUP else GROUP

    def middle(vectors: Tensor) -> Tensor:
        by_head = vectors.float().abs().transpose(0, 1).flatten(1, 2)
        return by_head.unflatten(-1, (-1, width)).median(-1).values

    share = middle(rounded.float() - numbers.float()) / middle(numbers)
    return float(share.nan_to_num(0.0, 0.0).median(1).values.max())


class ChannelRanges(NamedTuple):
    """Where the channels of keys lie, and how wide: what is taken off before they are rounded.

    Channels far from 0, as the key biases of Qwen2 make them, would set the scale of all channels,
    and rounding would lose the others. Some keys lie far from the mean, such as those of sinks.
    They are rounded as they are, and the sign of their scales says so.

    Attributes:
        centre: (batch, kv_heads, 1, dim) float16, subtracted from keys that are centred.
        exponent: (batch, kv_heads, 1, dim) int8, the power of two that all keys are divided by.
    """

    centre: Tensor
    exponent: Tensor

    @classmethod
    def neutral(cls, batch: int, kv_heads: int, dim: int, device: torch.device) -> ChannelRanges:
        """Make those that change nothing."""
        sizes = (batch, kv_heads, 1, dim)
        return cls(
            torch.zeros(sizes, dtype=torch.float16, device=device),
            torch.zeros(sizes, dtype=torch.int8, device=device),
        )

    @property
    def factor(self) -> Tensor:
        """The powers of two, float32."""
        return torch.exp2(self.exponent).float()  # of integers in the default dtype: exact in all

    def narrow(self, keys: Tensor, *, choose: bool = True) -> tuple[Tensor, Tensor | None]:
        """Bring keys, (batch, kv_heads, tokens, dim), to what is rounded.

        Args:
            choose: whether a key that is shorter without it is not centred; else all are.

        Returns:
            The keys in float32, and bool (batch, kv_heads, tokens, 1), which of them are centred;
            the others are negated. None: all are centred.
        """
        factor = self.factor
        plain = keys / factor
        centred = torch.addcdiv(plain, self.centre, factor, value=-1)
        if not choose:
            return centred, None
        norms = (torch.linalg.vector_norm(each, dim=-1, keepdim=True) for each in (centred, plain))
        shorter = torch.le(*norms)
        return torch.where(shorter, centred, -plain), shorter

    def widen(self, narrowed: Tensor, apart: Tensor | None) -> Tensor:
        """Widen what `narrow` made of keys, float32; those it negated are so no longer.

        Args:
            apart: which of them are not centred, bool (batch, kv_heads, tokens, 1); None: none.
        """
        keys = narrowed * self.factor
        centred = keys + self.centre
        return centred if apart is None else torch.where(apart, keys, centred)

    def of_query(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a query is multiplied with in place of keys, and what is then missing.

        Its product with a key is the product of the first with the narrowed key, and the second
        if that key is centred.

        Args:
            query: (batch, kv_heads, group, 1, dim) float32.

        Returns:
            (batch, kv_heads, group, 1, dim) and (batch, kv_heads, group, 1, 1).
        """
        constant = (query * self.centre[:, :, None]).sum(-1, keepdim=True)
        return query * self.factor[:, :, None], constant


def with_signs(scales: Tensor, centred: Tensor) -> Tensor:
    """Write into the signs of scales, (.., scales), whose vectors are centred: bool (.., 1).

    Vectors that are not have been negated, so codes times scales are the vectors all the same.
    """
    return torch.where(centred, scales, -scales)


def are_apart(scales: Tensor) -> Tensor:
    """Read which vectors are not centred off the sign of their first scale: bool (.., 1)."""
    return torch.signbit(scales[..., :1])


FEWEST = 8
"""Tokens of a first block by which channels are judged."""

MOST_EXPONENT = 15
"""Of the powers of two that channels are divided by, to either side."""

_WIDEST = 3  # powers of two that a channel may stay wider than the middle one
_NARROWEST = 1  # the most by which one is widened: a constant channel may vary later
_VARIED = 0.1  # share of the values' energy around their mean; texts of real models: .3 to 1


def channel_ranges(keys: Tensor, valid: Tensor) -> ChannelRanges:
    """Find the mean of each channel of keys, and half the power of two by which it is wider.

    It is wider than the middle channel of its head, by standard deviations around the mean. Half
    the power leaves the larger channels the larger share of the codes, as attention needs it. Where
    a channel would still be more than 8 times as wide as the middle one, it is the larger power
    that leaves it at most so. No channel is widened by more than 2.

    Args:
        keys: (batch, kv_heads, tokens, dim).
        valid: bool (batch or 1, tokens), False for padding; fewer than `FEWEST` show nothing.
    """
    weight = valid[:, None, :, None].float()
    count = weight.sum(2, keepdim=True)
    numbers = keys.detach().float() * weight
    mean = numbers.sum(2, keepdim=True) / count.clamp(min=1)
    limit = torch.finfo(torch.float16).max
    centre = (
        torch.where(count >= FEWEST, mean, 0.0)
        .nan_to_num(0.0, 0.0, 0.0)
        .clamp(-limit, limit)
        .half()
    )
    squares = ((numbers - centre) * weight).square().sum(2, keepdim=True)
    spread = (squares / count.clamp(min=1)).sqrt()
    middle = spread.median(-1, keepdim=True).values
    powers = (spread / middle).log2().nan_to_num(0.0, 0.0, 0.0)
    powers = torch.maximum((powers / 2).round(), powers.ceil() - _WIDEST)
    known = (count >= FEWEST) & (middle > 0) & (spread > 0)
    exponent = torch.where(known, powers, 0.0).clamp(-_NARROWEST, MOST_EXPONENT)
    return ChannelRanges(centre, exponent.to(torch.int8))


def are_varied(values: Tensor, valid: Tensor) -> Tensor:
    """Say whether a text is more than one token again and again, whose keys RoPE alone moves.

    Args:
        values: (batch, kv_heads, tokens, dim), which have no positions.
        valid: bool (batch or 1, tokens), False for padding.

    Returns:
        Bool (batch, kv_heads, 1, 1): whether half of the values or more lie away from the mean, or
            all are 0.
    """
    numbers = values.detach().float().masked_fill(~valid[:, None, :, None], torch.nan)
    apart = (numbers - numbers.nanmean(2, keepdim=True)).square().sum(-1, keepdim=True)
    energy = numbers.square().sum(-1, keepdim=True).nanmean(2, keepdim=True)
    return apart.nanmedian(2, keepdim=True).values >= _VARIED * energy


def sylvester(size: int) -> Tensor:
    """Make the Hadamard matrix of a power of two by Sylvester's rule: (size, size) float32."""
    matrix = torch.ones(1, 1, dtype=torch.float32)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@lru_cache
def hadamard(dim: int, device: torch.device) -> Tensor:
    """Make the Hadamard matrix of the largest power of two that divides `dim`, block by block.

    Returns:
        (dim, dim) float32, orthogonal and its own inverse; the same tensor for all who ask.
    """
    size = dim & -dim
    with torch.inference_mode(False):
        blocks = torch.block_diag(*[sylvester(size)] * (dim // size))
        return (blocks / size**0.5).to(device)


class RandomRotation(NamedTuple):
    """The rotation that spreads outliers over all channels: random signs, then Hadamard.

    Dot products of rotated vectors are those of the vectors.

    Attributes:
        signs: (dim,) float32, 1 or -1.
        hadamard: (dim, dim) float32.
    """

    signs: Tensor
    hadamard: Tensor

    def rotate(self, vectors: Tensor) -> Tensor:
        """Rotate vectors, (.., dim): float32."""
        return (vectors.float() * self.signs) @ self.hadamard

    def rotate_back(self, vectors: Tensor) -> Tensor:
        """Rotate vectors, (.., dim), back: float32."""
        return (vectors.float() @ self.hadamard) * self.signs
