"""Attention of one query per row over quantised slots, against slots dequantised in full."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.kernels import join_parts, reference
from kvtool.kernels.checks import CODES, QUANTISED
from kvtool.maths.attention import attention_weights, group_queries, weighted_values
from kvtool.maths.columns import COLUMNS
from kvtool.maths.quantise import from_fp8, from_int4, from_int8, with_signs
from tests.kernels.drawn import DEVICE, TOLERANCE, Drawn, Sizes, copied, sizes

pytest.importorskip("triton")

from kvtool.kernels.attend_codes import assemble, attend_codes

DEQUANTISED = {"int8": from_int8, "fp8": from_fp8, "int4": from_int4}
forms = pytest.mark.parametrize("forms", CODES, ids="-".join)

Forms = tuple[str, str]  # of keys and of values


def quantised(forms: Forms, *pair: torch.Tensor) -> list[torch.Tensor]:
    """Codes and scales of keys and values, as views of buffers with garbage behind those in use."""
    views = []
    for form, tensor in zip(forms, pair, strict=True):
        for part in QUANTISED[form](tensor.cpu()):
            slots = part.shape[2]
            buffer = part.new_full((*part.shape[:2], slots + 3, part.shape[3]), 77)
            buffer[:, :, :slots] = part
            views.append(buffer.to(DEVICE)[:, :, :slots])
    return views


def compare(forms: Forms, size: Sizes, names, weights: bool) -> None:
    drawn = Drawn(size)
    codes = quantised(forms, drawn.key, drawn.value)
    generator = torch.Generator().manual_seed(size.seed)
    signs = torch.randn(*codes[1].shape[:3], 1, generator=generator) > 0
    codes[1].copy_(with_signs(codes[1], signs.to(DEVICE)))
    constants = 3 * torch.randn(size.batch, size.heads, generator=generator).to(DEVICE)
    stored = drawn.stored if size.ragged else None
    place = torch.arange(size.batch, device=DEVICE) - 1 if size.ragged else None
    options = {
        "forms": forms,
        "value_dim": size.value_dim,
        "scale": size.head_dim**-0.5,
        "softcap": size.softcap,
        "sinks": drawn.sinks,
        "place": place,
        "weights": weights,
        "constants": constants if size.seed % 5 else None,
    }
    sums = drawn.sums(names, size.cached)
    expected = copied(sums)
    tolerance = TOLERANCE[size.dtype]
    out, found = attend_codes(drawn.query, codes, stored, sums, **options)
    expected_out, expected_found = reference.attend_codes(
        drawn.query.float(), codes, stored, expected, **options
    )
    assert out.shape == (size.batch, size.heads, 1, size.value_dim)
    assert out.dtype == size.dtype
    torch.testing.assert_close(out.float(), expected_out, atol=tolerance, rtol=tolerance)
    assert (found is None) == (not weights)
    if weights:
        torch.testing.assert_close(found, expected_found, atol=tolerance, rtol=tolerance)
    for name in names:
        if name == "above_average" and forms[0] == "int4" and size.dtype is not torch.float32:
            # the kernel rounds keys to the dtype of the query: some weights cross the average
            off = (sums[name] - expected[name]).abs() > tolerance
            assert off.sum() <= max(2, 0.02 * off.numel())
        else:
            torch.testing.assert_close(sums[name], expected[name], atol=tolerance, rtol=tolerance)


@st.composite
def decoded(draw):
    """Any head sizes in 8 bits, and multiples of a group, powers of two and others, in 4 bits."""
    forms = draw(st.sampled_from(list(CODES)))
    dims = [
        draw(st.sampled_from([32, 64, 96, 160] if form == "int4" else [8, 16, 24, 40, 64]))
        for form in forms
    ]
    size = draw(sizes(most_new=1, most_kept=200))
    return forms, replace(size, window=None, head_dim=dims[0], value_dim=dims[1])


@pytest.mark.exhaustive
@settings(max_examples=25)
@given(decoded(), st.sets(st.sampled_from(COLUMNS)), st.booleans())
def test_codes_are_attended_and_counted_as_in_plain_torch(drawn, names, weights):
    compare(*drawn, sorted(names), weights)


@pytest.mark.parametrize(
    ("forms", "dtype"),
    [
        (("int8", "int8"), torch.bfloat16),
        (("fp8", "fp8"), torch.float16),
        (("int4", "int4"), torch.float32),
        (("int8", "int4"), torch.float16),
        (("int4", "int8"), torch.bfloat16),
    ],
)
@pytest.mark.few(1)
def test_every_form_with_padding_sinks_and_a_soft_cap(forms, dtype):
    """Heads of 96 and 32: one is no power of two; one row of the batch is padding."""
    compare(forms, Sizes(2, 1, 2, 4, 70, 1, 96, 32, dtype, True, None, 3.0, True, 3), COLUMNS, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("share", [1, 4, 7, 8, 16])
@forms
@pytest.mark.few(2)
def test_groups_of_queries_share_tiles_of_every_width(forms, share, dim, dtype):
    """Of 70 slots, one tile is full and one is not."""
    compare(
        forms, Sizes(1, 1, 1, share, 69, 1, dim, dim, dtype, True, None, 9.0, True, 3), [], True
    )


@pytest.mark.parametrize("forms", [("int8", "int8"), ("int4", "int4")], ids="-".join)
@pytest.mark.few(1)
def test_long_caches_are_split_and_joined(forms, monkeypatch):
    monkeypatch.setattr(join_parts, "_SPLIT", 64)
    size = Sizes(1, 2, 2, 4, 150, 1, 32, 64, torch.float32, True, None, None, False, seed=9)
    compare(forms, size, COLUMNS, weights=True)


# ---- against explicit dequantisation


def in_full(forms, query, codes, visible=None):
    """Weights and output of attention over keys and values that are dequantised first."""
    pairs = codes[:2], codes[2:]
    key, value = (
        DEQUANTISED[form](*pair).double() for form, pair in zip(forms, pairs, strict=True)
    )
    grouped = group_queries(query.double(), key.shape[1])
    weights = attention_weights(grouped, key, scale=query.shape[-1] ** -0.5, visible=visible)
    return weights.float(), weighted_values(weights, value).float()


@pytest.mark.few(1)
@forms
def test_attention_over_codes_equals_explicit_dequantisation(forms):
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(2, 6, 1, 64, generator=generator).to(DEVICE)
    key = torch.randn(2, 2, 70, 64, generator=generator)
    value = torch.randn(2, 2, 70, 96, generator=generator)
    codes = quantised(forms, key, value)
    stored = torch.arange(70, device=DEVICE).expand(2, 2, -1).clone()
    stored[:, 1, ::3] = -1
    sums = {"attention_sum": torch.zeros(2, 2, 70, device=DEVICE)}
    out, weights = attend_codes(
        *(query, codes, stored, sums), forms=forms, value_dim=96, scale=1 / 8, weights=True
    )
    expected, expected_out = in_full(forms, query, codes, (stored >= 0)[:, :, None, None])
    torch.testing.assert_close(weights, expected.flatten(1, 3), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out, expected_out, atol=1e-5, rtol=1e-5)
    mean = expected.mean((2, 3))
    torch.testing.assert_close(sums["attention_sum"], mean, atol=1e-5, rtol=1e-5)


@pytest.mark.few(1)
@forms
def test_a_sign_of_scales_takes_the_constant_off_and_of_zeros_too(forms):
    """Two keys of zeros, of which the first is centred: its logit is the constant of the query."""
    value = torch.zeros(1, 1, 2, 64)
    value[:, :, 0] = 1
    codes = quantised(forms, torch.zeros(1, 1, 2, 64), value)
    codes[1][:, :, 1] = -0.0
    query = torch.ones(1, 2, 1, 64, device=DEVICE)
    constants = torch.tensor([[math.log(3) * 8, -math.log(3) * 8]], device=DEVICE)
    how = {"forms": forms, "value_dim": 64, "scale": 1 / 8, "constants": constants}
    out, _ = attend_codes(query, codes, None, {}, **how)
    expected = torch.tensor([0.75, 0.25]).view(1, 2, 1, 1).expand(1, 2, 1, 64)
    torch.testing.assert_close(out.cpu(), expected, atol=2e-3, rtol=2e-3)


# ---- the formats, bit by bit


def e4m3(byte: int) -> float:
    """One float of 8 bits: sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -size if byte & 128 else size


def one_slot(form: str, codes: list[int], scales: list[float], value_dim: int) -> list[float]:
    """A cache of one slot gives its value as it is."""
    dtype = torch.int8 if form == "int8" else torch.uint8
    value = torch.tensor(codes, dtype=dtype, device=DEVICE).view(1, 1, 1, -1)
    sizes = torch.tensor(scales, dtype=torch.float16, device=DEVICE).view(1, 1, 1, -1)
    query = torch.ones(1, 1, 1, value_dim, device=DEVICE)
    given = query, [value, sizes] * 2, None, {}
    out, _ = attend_codes(*given, forms=(form, form), value_dim=value_dim, scale=1.0)
    return out.flatten().tolist()


def test_all_bytes_of_fp8_are_decoded_exactly():
    numbers = [byte for byte in range(256) if byte & 127 != 127]  # two are NaN
    assert one_slot("fp8", numbers, [0.25], 254) == [e4m3(byte) / 4 for byte in numbers]


def test_all_bytes_of_int8_are_decoded_exactly():
    numbers = list(range(-128, 128))
    assert one_slot("int8", numbers, [0.25], 256) == [number / 4 for number in numbers]


def test_nibbles_stand_in_their_channels_beside_their_scales():
    """96 channels: byte i holds i (low) and 48 + i (high), and three groups have a scale each."""
    generator = torch.Generator().manual_seed(7)
    numbers = torch.randint(256, (48,), generator=generator).tolist()
    scales = [0.5, 2.0, 8.0]
    channels = [byte & 15 for byte in numbers] + [byte >> 4 for byte in numbers]
    expected = [(code - 8) * scales[i // 32] for i, code in enumerate(channels)]
    assert one_slot("int4", numbers, scales, 96) == expected


def halves_of(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers in each half of a register, the lower first."""
    both = torch.stack([numbers & 0xFFFF, numbers >> 16])
    return both.to(torch.uint16).view(dtype).double()


def run_ptx(text: str, argument: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Run the few instructions that decode a register with two words, on a CPU."""
    registers = {"$1": argument}
    for line in text.split("c; ", 1)[1].removesuffix(" }").split(";")[:-1]:
        name, target, *operands = line.replace(",", "").split()
        a, *rest = (
            registers[each] if each in registers else torch.tensor(int(each, 0))
            for each in operands
        )
        match name.split(".")[0]:
            case "mov":
                found = a.expand_as(argument)
            case "shl":
                found = (a << rest[0]) & 0xFFFFFFFF
            case "shr":
                found = a >> rest[0]
            case "and":
                found = a & rest[0]
            case "or":
                found = a | rest[0]
            case "lop3":
                assert rest[2] == 0xEA
                found = (a & rest[0]) | rest[1]
            case "fma":
                assert name == f"fma.rn.{'bf16x2' if dtype == torch.bfloat16 else 'f16x2'}"
                a, b, c = (halves_of(each, dtype) for each in (a, *rest))
                return (a * b + c).to(dtype)
        registers[target] = found
    raise AssertionError("the last instruction gives the numbers")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["int8", "fp8", "int4"])
def test_assembly_decodes_every_word_exactly(form, dtype):
    words = torch.arange(2**16)
    other = words.flip(0)
    places = assemble(form, dtype)
    assert len(places) == (4 if form == "int4" else 2)
    for place, text in enumerate(places):
        found = run_ptx(text, words | other << 16, dtype).tolist()
        for numbers, read in zip(found, (words, other), strict=True):
            byte = (read >> 8 * (place % 2) & 255).tolist()
            if form == "fp8":
                real = [i for i, each in enumerate(byte) if each & 127 != 127]  # two are NaN
                assert [numbers[i] * 256 for i in real] == [e4m3(byte[i]) for i in real]
            elif form == "int8":
                assert numbers == [each - 256 * (each > 127) for each in byte]
            else:
                assert numbers == [(each >> 4 * (place // 2) & 15) - 8 for each in byte]


# ---- what must not matter


@pytest.mark.few(1)
@pytest.mark.parametrize("forms", [("int8", "int8"), ("fp8", "fp8")], ids="-".join)
def test_what_lies_in_empty_slots_changes_nothing(forms, monkeypatch):
    """A slot that was never written may hold any bits, NaN as a scale among them."""
    size = Sizes(1, 1, 1, 2, 150, 1, 32, 32, torch.float32, True, None, None, False, seed=11)
    monkeypatch.setattr(join_parts, "_SPLIT", 64)
    drawn = Drawn(size)
    drawn.stored[..., :70] = -1  # a whole part
    codes = quantised(forms, drawn.key, drawn.value)
    empty = drawn.stored[0, 0] < 0
    for tensor in codes:
        tensor[:, :, empty] = math.nan if tensor.is_floating_point() else 127
    kept = [tensor[:, :, ~empty] for tensor in codes]
    out, weights = attend_codes(
        *(drawn.query, codes, drawn.stored, {}),
        forms=forms,
        value_dim=32,
        scale=0.2,
        weights=True,
    )
    options = {"forms": forms, "value_dim": 32, "scale": 0.2, "weights": True}
    expected, expected_weights = reference.attend_codes(drawn.query, kept, None, {}, **options)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights[..., ~empty], expected_weights, atol=1e-5, rtol=1e-5)
    assert not weights[..., empty].any()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "forms", [("int8", "int8"), ("fp8", "fp8"), ("int4", "int4")], ids="-".join
)
def test_small_values_keep_their_bits_in_half_precision(forms):
    """Weights of e^-6 times scales of 1e-4 are denormal in float16; the first slot has no value."""
    generator = torch.Generator().manual_seed(8)
    query = torch.ones(1, 1, 1, 32, dtype=torch.float16, device=DEVICE)
    key, value = torch.zeros(1, 1, 300, 32), torch.rand(1, 1, 300, 32, generator=generator)
    key[:, :, 0], value[:, :, 0] = 6 / 32, 0
    codes = quantised(forms, key, value * 0.0127)
    options = {"forms": forms, "value_dim": 32, "scale": 1.0}
    out, _ = attend_codes(query, codes, None, {}, **options)
    expected, _ = reference.attend_codes(query.float(), codes, None, {}, **options)
    torch.testing.assert_close(out.float(), expected, atol=0, rtol=2e-3)


@pytest.mark.gpu
@forms
def test_a_gpu_reads_codes_as_they_lie(forms):
    """One layer of an 8B model over 32K slots: what is allocated is far smaller than the codes."""
    assert DEVICE == "cuda"
    query = torch.randn(1, 32, 1, 128, device=DEVICE, dtype=torch.bfloat16)
    pair = [torch.randn(1, 8, 32768, 128, device=DEVICE) for _ in range(2)]
    codes = [
        each for form, tensor in zip(forms, pair, strict=True) for each in QUANTISED[form](tensor)
    ]
    del pair
    sums = {"attention_sum": torch.zeros(1, 8, 32768, device=DEVICE)}
    expected = copied(sums)
    options = {"forms": forms, "value_dim": 128, "scale": 128**-0.5, "weights": True}
    attend_codes(query, codes, None, copied(sums), **options)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = attend_codes(query, codes, None, sums, **options)
    torch.cuda.synchronize()
    # logits, and as much again for what the parts leave; keys in bf16 would be 64 MiB
    assert torch.cuda.max_memory_allocated() - before < 2 * 32 * 32768 * 4
    expected_out, _ = reference.attend_codes(query.float(), codes, None, expected, **options)
    torch.testing.assert_close(out.float(), expected_out, atol=2e-2, rtol=2e-2)
    for name, total in sums.items():
        torch.testing.assert_close(total, expected[name], atol=2e-2, rtol=2e-2)
