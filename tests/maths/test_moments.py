"""Mean and scatter of vectors in parts, and mean turns, against plain sums."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.maths.rotation import Rotation
from kvtool.maths.statistics import add_moments, from_correlations, to_correlations
from kvtool.policies.evidence import QueryMoments


def in_parts(vectors, valid, sizes):
    batch, heads, tokens, dim = vectors.shape
    count, mean = torch.zeros(batch, heads), torch.zeros(batch, heads, dim)
    scatter, start = torch.zeros(batch, heads, dim, dim), 0
    for size in [*sizes, tokens]:
        own = slice(start, start + size)
        start += size
        count, mean, scatter = add_moments(count, mean, scatter, vectors[:, :, own], valid[:, own])
    return count, mean, scatter


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 2), st.lists(st.integers(1, 6), max_size=4))
def test_parts_equal_plain_loops(seed, heads, sizes):
    source = torch.Generator().manual_seed(seed)
    vectors = torch.randn(2, heads, 13, 3, generator=source)
    valid = torch.rand(2, 13, generator=source) > 0.4
    count, mean, scatter = in_parts(vectors, valid, sizes)
    for row in range(2):
        for head in range(heads):
            kept = [vectors[row, head, t].tolist() for t in range(13) if valid[row, t]]
            assert count[row, head] == len(kept)
            centre = [sum(v[i] for v in kept) / max(len(kept), 1) for i in range(3)]
            assert mean[row, head].tolist() == pytest.approx(centre, abs=1e-5)
            for i in range(3):
                for j in range(3):
                    total = sum((v[i] - centre[i]) * (v[j] - centre[j]) for v in kept)
                    assert scatter[row, head, i, j].item() == pytest.approx(total, abs=1e-4)


def test_nothing_cancels_far_from_zero():
    source = torch.Generator().manual_seed(0)
    vectors = torch.randn(1, 1, 4000, 3, generator=source) + torch.tensor([3000.0, -500, 0])
    _, mean, scatter = in_parts(vectors, torch.ones(1, 4000).bool(), [100] * 39)
    exact = vectors[0, 0].double()
    torch.testing.assert_close(mean[0, 0].double(), exact.mean(0), atol=1e-3, rtol=1e-6)
    variance = exact.T.cov(correction=0).float()
    torch.testing.assert_close(scatter[0, 0] / 4000, variance, atol=1e-3, rtol=1e-3)
    sums = vectors[0, 0].T @ vectors[0, 0] / 4000 - torch.outer(mean[0, 0], mean[0, 0])
    assert (sums - variance).abs().max() > 0.1  # what plain sums would give


def test_worked_correlations():
    """1 / (2 * 3) is 21.17 of 127, and -4.5 / (2 * 3) is -95.25; nothing varies in the last one."""
    scatter = torch.tensor([[4.0, 1, 0], [1, 9, 0], [0, 0, 0]])
    both = torch.stack([scatter, torch.tensor([[4.0, -4.5, 0], [-4.5, 9, 0], [0, 0, 0]])])
    squares, correlations = to_correlations(both)
    assert squares.tolist() == [[4, 9, 0]] * 2
    assert correlations.dtype == torch.int8
    assert correlations.tolist() == [[21, 0, 0], [-95, 0, 0]]
    found = from_correlations(squares, correlations)
    assert found[0, 0, 1].item() == found[0, 1, 0].item() == pytest.approx(21 / 127 * 6)
    assert found[1, 1, 0].item() == pytest.approx(-95 / 127 * 6)
    assert found.diagonal(dim1=1, dim2=2).tolist() == [[4, 9, 0]] * 2


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 7), st.sampled_from([1e-18, 1.0, 1e15]))
def test_rounded_correlations_are_near_and_stay_as_they_are(seed, dim, size):
    source = torch.Generator().manual_seed(seed)
    vectors = torch.randn(2, 3, 9, dim, generator=source) * size
    vectors = vectors * torch.logspace(-3, 3, dim)  # of channels that differ in width
    scatter = vectors.transpose(2, 3) @ vectors
    squares, correlations = to_correlations(scatter)
    found = from_correlations(squares, correlations)
    lengths = scatter.diagonal(dim1=2, dim2=3).sqrt()
    apart = (found - scatter).abs() / lengths[..., None] / lengths[..., None, :]
    assert apart.max() < 0.501 / 127
    for one, other in zip(to_correlations(found), (squares, correlations), strict=True):
        assert torch.equal(one, other)


@settings(max_examples=40)
@given(st.integers(0, 5000), st.integers(1, 60), st.booleans())
def test_a_mean_turn_is_the_mean_of_turns(start, count, interleaved):
    frequencies = torch.tensor([1.0, 0.3, 0.0])
    rotation = Rotation(frequencies, interleaved)
    states = torch.randn(1, 2, 1, 8, generator=torch.Generator().manual_seed(start))
    found = rotation.rotate(states, rotation.mean_rotation(start, count))
    places = torch.arange(start, start + count).float()[None, None]
    each = rotation.shift(states.expand(-1, -1, count, -1), places)
    torch.testing.assert_close(found, each.mean(2, keepdim=True), atol=2e-3, rtol=1e-3)


def test_a_mean_turn_of_each_row_and_of_any_length():
    rotation = Rotation(torch.tensor([1.0, 0.1]), False)
    start = torch.tensor([[[5]], [[900]]])
    both = rotation.mean_rotation(start, 2**31 - 1)
    assert both.shape == (2, 1, 1, 4)
    assert both.abs().max() < 1e-6
    one = rotation.mean_rotation(5, 1)[0, 0, 0].tolist()
    turned = [math.cos(5), math.cos(0.5), math.sin(5), math.sin(0.5)]
    assert one == pytest.approx(turned, abs=1e-6)


def test_a_covariance_is_turned_from_both_sides():
    """By the matrix that turns unit vectors, for R C R^T of numbers that are not symmetric in R."""
    source = torch.Generator().manual_seed(3)
    rotation = Rotation(torch.tensor([1.0, 0.1]), False)
    root = torch.randn(2, 3, 5, 5, generator=source)
    covariance, mean = root @ root.transpose(2, 3), torch.randn(2, 3, 5, generator=source)
    start = torch.tensor([[[7]], [[30]]])
    ahead = QueryMoments(mean, covariance, 1.0, rotation).ahead(start, 4)
    units = torch.eye(5).expand(2, 3, 5, 5)
    turn = rotation.rotate(units, rotation.mean_rotation(start, 4)).transpose(2, 3)
    torch.testing.assert_close(ahead.mean, (turn @ mean[..., None])[..., 0])
    torch.testing.assert_close(ahead.covariance, turn @ covariance @ turn.transpose(2, 3))
    still = QueryMoments(mean, None, 1.0, None)
    assert still.ahead(start, 4) is still
