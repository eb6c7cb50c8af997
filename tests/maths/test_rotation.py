"""Turning pairs: against complex numbers, additive, and silent about what has no position."""

import math

import pytest
import torch

from kvtool.maths.rotation import cosines_and_sines, rope_shift

FREQUENCIES = torch.tensor([1.0, 0.3, 0.01])


def as_complex(vector, interleaved):
    pairs = [(0, 1), (2, 3), (4, 5)] if interleaved else [(0, 3), (1, 4), (2, 5)]
    return [complex(vector[a], vector[b]) for a, b in pairs]


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_turn_multiplies_each_pair_by_a_complex_number(interleaved):
    states = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    by = torch.tensor([4.0, -7.0, 0.0, 100.0, 1.0]).expand(2, 1, 5)
    shifted = rope_shift(states, cosines_and_sines(by, FREQUENCIES), interleaved=interleaved)
    assert torch.equal(shifted[..., 6:], states[..., 6:])
    for row, head, token in [(0, 0, 0), (1, 2, 1), (0, 1, 3), (1, 0, 4)]:
        before = as_complex(states[row, head, token].tolist(), interleaved)
        after = as_complex(shifted[row, head, token].tolist(), interleaved)
        for old, new, frequency in zip(before, after, FREQUENCIES.tolist(), strict=True):
            angle = by[row, 0, token].item() * frequency
            expected = old * complex(math.cos(angle), math.sin(angle))
            assert abs(new - expected) < 1e-4


def test_no_turn_changes_nothing_in_any_dtype():
    for dtype in (torch.float32, torch.bfloat16):
        states = torch.randn(1, 2, 3, 6).to(dtype)
        still = cosines_and_sines(torch.zeros(1, 2, 3), FREQUENCIES)
        assert torch.equal(rope_shift(states, still, interleaved=False), states)


def test_turns_by_hand():
    # a quarter turn takes (1, 0) to (0, 1); half a turn of the second pair takes (0, 2) to (0, -2)
    quarter = torch.tensor([math.pi / 2, math.pi])
    states = torch.tensor([[[[1.0, 0.0, 0.0, 2.0]]]])
    shifted = rope_shift(states, cosines_and_sines(torch.ones(1, 1, 1), quarter), interleaved=False)
    torch.testing.assert_close(shifted, torch.tensor([[[[0.0, 0.0, 1.0, -2.0]]]]))
