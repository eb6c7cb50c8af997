"""Surprisals against a plain log-softmax."""

import pytest
import torch

from kvtool.maths.statistics import surprisals


def test_known_probabilities():
    p = torch.tensor([0.9, 0.05, 0.5, 0.01, 0.8])
    logits = torch.stack([p, 1 - p], -1).log() + 3.0  # a shift changes nothing
    found = surprisals(logits[None], torch.zeros(1, 5, dtype=torch.long), torch.arange(5)[None])
    expected = torch.tensor([[0.105361, 2.995732, 0.693147, 4.60517, 0.223144]])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_token_by_any_column(dtype):
    source = torch.Generator().manual_seed(0)
    logits = (torch.randn(3, 150, 11, generator=source) * 5).to(dtype)
    tokens = torch.randint(0, 11, (3, 7), generator=source)
    at = torch.randint(0, 150, (3, 7), generator=source)
    found = surprisals(logits, tokens, at)
    for row in range(3):
        for i in range(7):
            line = logits[row, at[row, i]].double().log_softmax(-1)
            assert abs(found[row, i].item() + line[tokens[row, i]].item()) < 1e-5
    assert found.dtype == torch.float32


def test_an_impossible_token_and_a_certain_one():
    logits = torch.tensor([[[0.0, float("-inf")]]])
    found = surprisals(logits, torch.tensor([[0, 1]]), torch.tensor([[0, 0]]))
    assert found.tolist() == [[0.0, float("inf")]]
