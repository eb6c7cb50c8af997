"""Attention of one query per row, counted in the same pass, against weights in full."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.kernels import join_parts, reference
from kvtool.maths.columns import COLUMNS
from tests.kernels.drawn import DEVICE, TOLERANCE, Drawn, Sizes, copied, sizes

pytest.importorskip("triton")

from kvtool.kernels.attend_slots import attend_slots


def in_full(given):
    """Queries, keys and values in float32: plain torch rounds logits of halves."""
    return *(tensor.float() for tensor in given[:3]), *given[3:]


def compare(size: Sizes, names, weights: bool) -> None:
    drawn = Drawn(size)
    given = drawn.query, drawn.key, drawn.value, drawn.stored if size.ragged else None
    place = torch.arange(size.batch, device=DEVICE) - 1 if size.ragged else None
    options = {
        "scale": size.head_dim**-0.5,
        "softcap": size.softcap,
        "sinks": drawn.sinks,
        "place": place,
        "weights": weights,
    }
    sums = drawn.sums(names, size.cached)
    expected = copied(sums)
    tolerance = TOLERANCE[size.dtype]
    out, found = attend_slots(*given, sums, **options)
    expected_out, expected_found = reference.attend_slots(*in_full(given), expected, **options)
    assert out.shape == (size.batch, size.heads, 1, size.value_dim)
    assert out.dtype == size.dtype
    torch.testing.assert_close(out.float(), expected_out, atol=tolerance, rtol=tolerance)
    assert (found is None) == (not weights)
    if weights:
        torch.testing.assert_close(found, expected_found, atol=tolerance, rtol=tolerance)
    for name in names:
        torch.testing.assert_close(sums[name], expected[name], atol=tolerance, rtol=tolerance)


def decoded(most_kept: int = 200):
    return sizes(most_new=1, most_kept=most_kept).map(lambda size: replace(size, window=None))


@pytest.mark.exhaustive
@settings(max_examples=10)
@given(decoded(), st.sets(st.sampled_from(COLUMNS)), st.booleans())
def test_slots_are_attended_and_counted_as_in_plain_torch(size, names, weights):
    compare(size, sorted(names), weights)


@pytest.mark.few(1)
@pytest.mark.parametrize("kept", [150, 63, 64])
def test_long_caches_are_split_and_joined(kept, monkeypatch):
    monkeypatch.setattr(join_parts, "_SPLIT", 64)
    size = Sizes(2, 2, 2, 6, kept, 1, 24, 16, torch.float32, True, None, None, True, seed=9)
    compare(size, COLUMNS, weights=True)


def test_more_slots_than_the_parts_that_are_joined_at_once(monkeypatch):
    monkeypatch.setattr(join_parts, "_SPLIT", 16)
    monkeypatch.setattr(join_parts, "_PARTS", 3)
    size = Sizes(1, 1, 1, 2, 100, 1, 8, 8, torch.float32, True, None, None, False, seed=10)
    compare(size, COLUMNS, weights=True)


def test_a_part_of_the_cache_that_is_empty_changes_nothing(monkeypatch):
    """A whole tile, and a whole part, of empty slots: their maximum is minus infinity."""
    monkeypatch.setattr(join_parts, "_SPLIT", 64)
    size = Sizes(1, 1, 1, 3, 150, 1, 16, 16, torch.float32, True, None, None, False, seed=11)
    drawn = Drawn(size)
    drawn.stored[..., :70] = -1
    sums = drawn.sums(COLUMNS, 1)
    expected = copied(sums)
    out, _ = attend_slots(drawn.query, drawn.key, drawn.value, drawn.stored, sums, scale=0.25)
    rest = {name: total[..., 70:] for name, total in expected.items()}
    expected_out, _ = reference.attend_slots(
        drawn.query,
        drawn.key[:, :, 70:],
        drawn.value[:, :, 70:],
        drawn.stored[..., 70:],
        rest,
        scale=0.25,
    )
    torch.testing.assert_close(out, expected_out, atol=2e-5, rtol=2e-5)
    for name in COLUMNS:
        torch.testing.assert_close(sums[name], expected[name], atol=2e-5, rtol=2e-5)


@pytest.mark.exhaustive
@settings(max_examples=8)
@given(decoded(), st.booleans(), st.integers(1, 90), st.booleans(), st.booleans())
def test_chosen_slots_are_read_where_they_lie(size, by_query_head, count, weights, padded):
    drawn = Drawn(size)
    lists = size.heads if by_query_head else size.shown
    slots = size.kept + 1
    generator = torch.Generator().manual_seed(size.seed)
    chosen = torch.rand(size.batch, lists, slots, generator=generator).argsort(-1)[..., :count]
    places = None
    if padded:  # rows that read fewer than others: nothing at the ends of their lists
        fewer = torch.randint(1, chosen.shape[2] + 1, (size.batch, 1, 1), generator=generator)
        places = torch.arange(chosen.shape[2]).expand(chosen.shape)
        places = places.masked_fill(places >= fewer, -1).to(DEVICE)
    given = drawn.query, drawn.key, drawn.value, places, {}
    options = {
        "scale": size.head_dim**-0.5,
        "softcap": size.softcap,
        "sinks": drawn.sinks,
        "weights": weights,
        "chosen": chosen.to(DEVICE),
    }
    tolerance = TOLERANCE[size.dtype]
    out, found = attend_slots(*given, **options)
    expected, expected_found = reference.attend_slots(*in_full(given), **options)
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    if weights:
        torch.testing.assert_close(found, expected_found, atol=tolerance, rtol=tolerance)
