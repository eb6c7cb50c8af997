"""Attention of many queries, its log-sum-exp and counts, against plain torch."""

import pytest
import torch
from hypothesis import given, settings

from kvtool.kernels import reference
from tests.kernels.drawn import TOLERANCE, Drawn, Sizes, sizes

pytest.importorskip("triton")

from kvtool.kernels.attend_rows import attend_rows


def compare(size: Sizes) -> None:
    drawn = Drawn(size)
    given = drawn.query, drawn.key, drawn.value, drawn.new, drawn.stored
    options = {
        "scale": size.head_dim**-0.5,
        "window": size.window,
        "softcap": size.softcap,
        "sinks": drawn.sinks,
        "in_order": not size.ragged,
    }
    real = (drawn.new >= 0)[:, None].expand(-1, size.heads, -1)
    tolerance = TOLERANCE[size.dtype]
    out, lse, seen = attend_rows(*given, **options)
    expected, expected_lse, expected_seen = reference.attend_rows(*given, **options)
    assert out.shape == (size.batch, size.heads, size.new, size.value_dim)
    assert out.dtype == size.dtype
    assert out.isfinite().all(), "what padding reads must not poison later layers"
    torch.testing.assert_close(out[real], expected[real], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse[real], expected_lse[real], atol=1e-4, rtol=1e-4)
    assert torch.equal(seen[real], expected_seen[real])


@pytest.mark.exhaustive
@settings(max_examples=6)
@given(sizes())
def test_rows_attend_as_in_plain_torch(size):
    compare(size)


@pytest.mark.exhaustive
def test_blocks_of_many_tiles():
    compare(Sizes(2, 2, 2, 6, 150, 130, 24, 40, torch.float32, True, None, 4.0, True, seed=3))
    compare(Sizes(1, 1, 1, 2, 70, 140, 16, 16, torch.bfloat16, False, 30, None, False, seed=4))


def test_keys_are_counted_only_where_that_is_asked_for():
    drawn = Drawn(
        Sizes(1, 1, 1, 2, 20, 40, 16, 16, torch.float32, False, None, None, False, seed=5)
    )
    given = drawn.query, drawn.key, drawn.value, drawn.new, drawn.stored
    counted, plain = (attend_rows(*given, scale=0.25, counted=each) for each in (True, False))
    assert plain[2] is None
    assert all(torch.equal(one, other) for one, other in zip(counted[:2], plain[:2], strict=True))
