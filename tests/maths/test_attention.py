"""Attention weights: masks, sinks, and gradients."""

import math

import pytest
import torch

from kvtool.maths.attention import attention_weights, attention_weights_lse


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_weights_and_what_they_are_divided_by(masked, sinks):
    """Two query heads, each with a sink of its own; masked, the first row sees nothing."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(1, 1, 2, 2, 4, generator=generator)
    keys = torch.randn(1, 1, 3, 4, generator=generator)
    sink = torch.tensor([[[0.7, -2.0]]]) if sinks else None
    seen = torch.tensor([[False] * 3, [True, False, True]]) if masked else None
    told = {"scale": 0.5, "visible": seen}
    weights, lse = attention_weights_lse(query, keys, **told, sinks=sink)
    for head in range(2):
        for row in range(2):
            parts = [
                math.exp(0.5 * float(query[0, 0, head, row] @ keys[0, 0, i]))
                if seen is None or seen[row, i]
                else 0.0
                for i in range(3)
            ]
            total = sum(parts) + (math.exp(sink[0, 0, head]) if sinks else 0)
            expected = [part / total if total else 0.0 for part in parts]
            assert weights[0, 0, head, row].tolist() == pytest.approx(expected, abs=1e-6)
            log = math.log(total) if total else -math.inf
            assert lse[0, 0, head, row].item() == pytest.approx(log, abs=1e-5)


def test_a_mask_of_the_last_keys_is_one_whose_other_keys_are_visible():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 2, 3, 4, 8, generator=generator)
    keys = torch.randn(2, 2, 11, 8, generator=generator)
    last = torch.ones(4, 4, dtype=torch.bool).tril()
    whole = torch.cat([torch.ones(4, 7, dtype=torch.bool), last], 1)
    weights = attention_weights(query, keys, scale=0.5, visible=last)
    assert torch.equal(weights, attention_weights(query, keys, scale=0.5, visible=whole))
    assert weights[..., 0, 8:].eq(0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 3, 4))


def test_weights_pass_gradients_on():
    """They are made in place where no gradients are asked for."""
    query = torch.randn(1, 1, 2, 3, 4, generator=torch.Generator().manual_seed(1))
    keys = torch.randn(1, 1, 5, 4, generator=torch.Generator().manual_seed(2))
    plain = attention_weights(query, keys, scale=1.0)
    query.requires_grad_()
    weights = attention_weights(query, keys, scale=1.0)
    assert torch.equal(weights, plain)
    weights[..., 0].sum().backward()
    assert query.grad.abs().sum() > 0
