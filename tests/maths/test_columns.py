"""Columns of attention against plain loops over rows."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.maths.columns import COLUMNS, add_columns, column_variance


def looped(weights, visible, valid):
    """Every column of one batch row and head, number by number."""
    group, rows, keys = weights.shape
    sums = {name: [0.0] * keys for name in COLUMNS}
    for row in range(rows):
        if not valid[row]:
            continue
        seen = sum(visible[row][key] for key in range(keys))
        for key in range(keys):
            mean = sum(weights[member, row, key].item() for member in range(group)) / group
            sums["attention_sum"][key] += mean
            sums["square_sum"][key] += mean**2
            sums["count"][key] += visible[row][key]
            sums["above_average"][key] += mean * seen >= 1 - 1e-6
    return sums


@settings(max_examples=30)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 7),
    st.booleans(),
    st.sets(st.sampled_from(COLUMNS), min_size=1),
    st.integers(0, 999),
)
def test_columns_are_sums_over_the_rows_of_each_head(heads, group, rows, keys, ragged, names, seed):
    generator = torch.Generator().manual_seed(seed)
    visible = torch.ones(2, heads, rows, keys, dtype=torch.bool)
    valid = torch.ones(2, rows, dtype=torch.bool)
    if ragged:
        visible = torch.rand(visible.shape, generator=generator) < 0.7
        visible[..., 0] = True
        valid = torch.rand(valid.shape, generator=generator) < 0.7
    logits = torch.randn(2, heads, group, rows, keys, generator=generator) * 2
    weights = logits.masked_fill(~visible[:, :, None], float("-inf")).softmax(-1)
    weights = weights * valid[:, None, None, :, None]
    start = {name: torch.rand(2, heads, keys + 2, generator=generator) for name in sorted(names)}
    sums = {name: total.clone() for name, total in start.items()}
    add_columns(sums, weights, visible if ragged else None, valid if ragged else None)
    for row in range(2):
        for head in range(heads):
            expected = looped(weights[row, head], visible[row, head].tolist(), valid[row].tolist())
            for name in names:
                found = sums[name][row, head] - start[name][row, head]
                wanted = torch.tensor([*expected[name], 0.0, 0.0])
                torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_an_even_row_is_above_average_everywhere():
    for keys in range(1, 100):
        sums = {"above_average": torch.zeros(1, 1, keys)}
        add_columns(sums, torch.zeros(1, 1, 3, 1, keys).softmax(-1))
        assert sums["above_average"].sum() == keys


def test_an_unknown_column_is_an_error():
    with pytest.raises(KeyError):
        add_columns({"largest": torch.zeros(1, 1, 2)}, torch.ones(1, 1, 1, 1, 2))


@pytest.mark.parametrize("seed", range(5))
def test_the_variance_of_column_sums_is_that_of_its_definition(seed):
    generator = torch.Generator().manual_seed(seed)
    sums = torch.rand(2, 3, 4, 9, generator=generator) * 10 ** (seed % 5 - 2)
    stored = torch.rand(2, 3, 1, 9, generator=generator) < 0.7
    got = column_variance(sums * stored, stored)
    for place in itertools.product(range(2), range(3), range(4)):
        batch, head, _ = place
        values = sums[place][stored[batch, head, 0]].tolist()
        mean = sum(values) / max(len(values), 1)
        expected = sum((value - mean) ** 2 for value in values) / max(len(values), 1)
        assert got[place].item() == pytest.approx(expected, rel=1e-5, abs=1e-12)


def test_sums_that_are_all_alike_have_no_variance():
    """Of 3 queries over 12 tokens, where mean square - 1 would be -15/16."""
    stored = torch.ones(12, dtype=torch.bool)
    assert column_variance(torch.full((12,), 0.25), stored).item() == 0
