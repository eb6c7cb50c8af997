"""The formats of slots: worked numbers, twins of one vector at a time, and what comes back."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.maths.quantise import (
    RandomRotation,
    fp8_codes,
    from_fp8,
    from_int4,
    from_int8,
    hadamard,
    int4_codes,
    int8_codes,
    sylvester,
)
from kvtool.policies.codec.int4 import Int4

FORMATS = {
    "int8": (int8_codes, from_int8, 127),
    "fp8": (fp8_codes, from_fp8, 448),
    "int4": (int4_codes, from_int4, 7),
}
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def half(number):
    """A number in the format of float16, to nearest even."""
    return struct.unpack("<e", struct.pack("<e", number))[0]


def scale_of(vector, largest):
    """The scale of one vector, by the formula."""
    peak = max(abs(x) for x in vector)
    return half(min(max(peak / largest, 2.0**-14), 65504.0)) if peak else 0.0


def nearest_e4m3(number):
    """The e4m3 float nearest to a number of at most 448, ties to the even mantissa."""
    grid = [m / 8 * 2.0**-6 for m in range(8)]
    grid += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    grid = grid[:-1]  # the last is NaN
    best = min(range(len(grid)), key=lambda i: (abs(grid[i] - abs(number)), i % 2))
    return math.copysign(grid[best], number)


def round_trip(vector, largest):
    """What a vector becomes when it is stored and read, one number at a time."""
    scale = scale_of(vector, largest)
    if not scale:
        return [0.0] * len(vector)
    kept = [min(max(x / scale, -largest), largest) for x in vector]
    nearest = nearest_e4m3 if largest == 448 else round  # which rounds half to even
    return [nearest(x) * scale for x in kept]


def test_worked_int8():
    codes, scales = int8_codes(torch.tensor([1, -2, 3, 0.5]))
    assert codes.tolist() == [42, -85, 127, 21]
    assert scales.item() == pytest.approx(0.02362061, abs=1e-8)


def test_worked_int4():
    rotation = RandomRotation(torch.ones(4), hadamard(4, CPU))
    rotated = rotation.rotate(torch.tensor([1, -2, 3, 0.5]))
    assert rotated.tolist() == [1.25, 2.75, -2.25, 0.25]
    codes, scales = int4_codes(torch.cat([rotated, torch.zeros(28)]))
    assert scales.item() == pytest.approx(0.3928223, abs=1e-7)
    assert [byte - 8 for byte in (codes & 15).tolist()[:4]] == [3, 7, -6, 1]
    back = rotation.rotate_back(from_int4(codes, scales)[:4])
    assert back.tolist() == pytest.approx([0.9820557, -2.1605225, 2.9461670, 0.5892334], abs=1e-6)


def test_two_codes_lie_in_a_byte():
    numbers = torch.zeros(64)
    numbers[3], numbers[35] = 7.0, -7.0
    codes, scales = int4_codes(numbers)
    assert [*codes.shape, *scales.shape] == [32, 2]
    assert codes[3].item() == (1 << 4 | 15)
    assert set(codes.tolist()) == {0x1F, 0x88}


numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)
small = st.floats(-(2.0**-23), 2.0**-23, width=32)
vectors = st.lists(st.one_of(numbers, small, st.just(0.0)), min_size=32, max_size=32)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30)
@given(vectors, st.sampled_from(DTYPES))
def test_a_vector_comes_back_as_the_formula_says(name, vector, dtype):
    encode, decode, largest = FORMATS[name]
    given = torch.tensor(vector).to(dtype)
    given = given.where(given.isfinite(), 1.0)
    back = decode(*encode(given))
    twin = torch.tensor(round_trip(given.tolist(), largest), dtype=torch.float64)
    scale = scale_of(given.tolist(), largest)
    step = scale if largest != 448 else scale * 32  # a tie of x / scale in float32
    off = (back.double() - twin).abs() > 1e-6 * twin.abs()
    assert off.sum() <= 1
    assert (back.double() - twin).abs().max() <= step * 1.01
    if scale and 2.0**-14 < scale < 65504:
        coarse = scale / 2 if largest != 448 else scale * 16
        assert (back - given.float()).abs().max() <= coarse * 1.002 + largest * scale * 2**-10


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_infinities_and_nan(name):
    encode, decode, largest = FORMATS[name]
    codes, scales = encode(torch.zeros(2, 32))
    assert not scales.any()
    assert not decode(codes, scales).any()
    assert set(codes.flatten().tolist()) == {0x88 if name == "int4" else 0}
    wide = torch.zeros(32)
    wide[0], wide[1] = float("inf"), float("-inf")
    back = decode(*encode(wide))
    assert back[:2].tolist() == [largest * 65504.0, -largest * 65504.0]
    assert not back[2:].any()
    wide[0] = float("nan")
    assert decode(*encode(wide)).isnan().all()


@pytest.mark.parametrize("name", FORMATS)
def test_denormals_have_the_smallest_normal_scale(name):
    encode, decode, _ = FORMATS[name]
    tiny = torch.full((32,), 2.0**-30)
    codes, scales = encode(tiny)
    assert set(scales.flatten().tolist()) == {2.0**-14}
    assert (decode(codes, scales) - tiny).abs().max() <= 2.0**-14 / 2


def test_fp8_is_torchs_own_format():
    every = torch.arange(256, dtype=torch.uint8)
    own = every.view(torch.float8_e4m3fn).float()
    finite = ~own.isnan()
    assert torch.equal(from_fp8(every, torch.ones(1).half())[finite], own[finite])


@pytest.mark.parametrize("size", [1, 8])
def test_sylvester(size):
    """By the parity of the bits that row and column share."""
    twin = [[(-1) ** (row & column).bit_count() for column in range(size)] for row in range(size)]
    assert sylvester(size).tolist() == twin


@pytest.mark.parametrize("dim", [32, 96, 576])
def test_a_rotation_keeps_dot_products(dim):
    rotation = Int4().rotation(3, dim, CPU)
    one, other = torch.randn(2, 5, dim)
    assert torch.allclose(rotation.rotate(one) @ rotation.rotate(other).T, one @ other.T, atol=1e-4)
    assert torch.allclose(rotation.rotate_back(rotation.rotate(one)), one, atol=1e-5)
    spread = rotation.rotate(torch.eye(dim))
    assert ((spread != 0).sum(0) == (dim & -dim)).all()  # over a whole block


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(dtype):
    try:
        torch.set_default_dtype(dtype)
        rotation = Int4().rotation(0, 160, CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    assert rotation.signs.dtype == rotation.hadamard.dtype == torch.float32


def test_layers_share_the_matrix():
    first, second = (Int4().rotation(layer, 64, CPU) for layer in (0, 1))
    assert first.hadamard is second.hadamard


def test_signs_differ_by_layer_and_never_change():
    first, second = (Int4().rotation(layer, 32, CPU).signs for layer in (0, 1))
    assert not torch.equal(first, second)
    assert "".join("+" if sign > 0 else "-" for sign in first.tolist()) == SIGNS


SIGNS = "-+---++---++---+--+++-+++++++-++"
