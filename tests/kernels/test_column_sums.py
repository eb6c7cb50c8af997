"""Columns of attention from the log-sum-exp, against weights in full."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.kernels import reference
from kvtool.maths.columns import COLUMNS
from tests.kernels.drawn import Drawn, Sizes, copied, sizes

pytest.importorskip("triton")

from kvtool.kernels.column_sums import column_sums


def compare(size: Sizes, names, by_query_head: bool = False) -> None:
    drawn = Drawn(size)
    shown = drawn.query, drawn.key, drawn.new, drawn.stored
    masks = {"scale": size.head_dim**-0.5, "window": size.window, "softcap": size.softcap}
    _, lse, seen = reference.attend_rows(
        drawn.query, drawn.key, drawn.value, drawn.new, drawn.stored, sinks=drawn.sinks, **masks
    )
    # away from 1 / keys, where rounding would decide what is above average
    sums = drawn.sums(names, size.heads if by_query_head else size.cached)
    expected = copied(sums)
    column_sums(*shown, lse, seen, sums, **masks)
    reference.column_sums(*shown, lse, seen, expected, **masks)
    assert sums.keys() == set(names)
    for name in names:
        torch.testing.assert_close(sums[name], expected[name], atol=2e-4, rtol=2e-4)


@pytest.mark.exhaustive
@settings(max_examples=6)
@given(sizes(), st.sets(st.sampled_from(COLUMNS), min_size=1), st.booleans())
def test_columns_add_up_as_in_plain_torch(size, names, by_query_head):
    compare(size, sorted(names), by_query_head)


@pytest.mark.exhaustive
def test_blocks_of_many_tiles():
    size = Sizes(2, 2, 4, 8, 150, 130, 24, 16, torch.float32, True, None, None, True, seed=5)
    compare(size, COLUMNS)
    size = Sizes(1, 1, 1, 2, 70, 140, 16, 16, torch.bfloat16, False, 30, 4.0, False, seed=6)
    compare(size, COLUMNS)


def test_the_weights_of_a_block_without_sinks_sum_to_the_number_of_its_queries():
    size = Sizes(1, 2, 2, 6, 30, 70, 16, 16, torch.float32, False, None, None, False, seed=7)
    drawn = Drawn(size)
    shown = drawn.query, drawn.key, drawn.new, drawn.stored
    _, lse, seen = reference.attend_rows(
        drawn.query, drawn.key, drawn.value, drawn.new, drawn.stored, scale=0.25
    )
    total = torch.zeros(1, 2, 100, device=lse.device)
    column_sums(*shown, lse, seen, {"attention_sum": total}, scale=0.25)
    torch.testing.assert_close(total.sum(-1), torch.full_like(total[..., 0], 70))


def test_sums_that_are_laid_out_differently_are_refused():
    size = Sizes(1, 1, 1, 1, 0, 4, 8, 8, torch.float32, False, None, None, False, seed=8)
    drawn = Drawn(size)
    lse = torch.zeros(1, 1, 4, device=drawn.key.device)
    apart = {
        "count": torch.zeros(1, 1, 4, device=lse.device),
        "square_sum": torch.zeros(1, 1, 9, device=lse.device)[..., :4],
    }
    with pytest.raises(ValueError):
        column_sums(drawn.query, drawn.key, drawn.new, drawn.stored, lse, lse, apart, scale=1.0)
