"""Columns that are written into tables, one by one."""

import pytest
import torch

from kvtool.maths.estimates import put_column


@pytest.mark.parametrize("at", [[[[4]]], [[[0]], [[6]]]], ids=["the same", "each its own"])
def test_a_column_of_each_sequence_is_written_in_place(at):
    table, column = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5)
    expected = table.clone()
    for entry in range(2):
        own = at[entry % len(at)][0][0]
        for head in range(3):
            for row in range(5):
                expected[entry, head, row, own] = column[entry, head, row]
    address = table.data_ptr()
    put_column(table, column, torch.tensor(at))
    assert torch.equal(table, expected)
    assert table.data_ptr() == address
