"""Attention weights: masks, and gradients."""

import torch

from kvtool.maths.attention import attention_weights


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
    """They are made in place where nobody asks for gradients."""
    query = torch.randn(1, 1, 2, 3, 4, generator=torch.Generator().manual_seed(1))
    keys = torch.randn(1, 1, 5, 4, generator=torch.Generator().manual_seed(2))
    plain = attention_weights(query, keys, scale=1.0)
    query.requires_grad_()
    weights = attention_weights(query, keys, scale=1.0)
    assert torch.equal(weights, plain)
    weights[..., 0].sum().backward()
    assert query.grad.abs().sum() > 0
