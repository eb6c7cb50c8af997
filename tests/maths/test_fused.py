"""The fused kernel of a CPU against attention written from its formula."""

import pytest
import torch

from kvtool.maths.attention import can_fuse, fused_attention, fused_group_attention


def drawn(*shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def slow(query, keys, values, scale, causal=False):
    """Row by row: query (q_len, dim), keys and values (kv_len, dim)."""
    outs, norms = [], []
    for i, row in enumerate(query.double()):
        seen = slice(0, i + 1) if causal else slice(None)
        logits = keys[seen].double() @ row * scale
        outs.append(logits.softmax(0) @ values[seen].double())
        norms.append(logits.exp().sum().log())
    return torch.stack(outs).float(), torch.stack(norms).float()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 7, 300])
def test_output_and_log_sum_exp(length, causal):
    query, keys, values = (drawn(2, 3, length, 16, seed=seed) for seed in range(3))
    assert can_fuse(query, keys, values)
    out, lse = fused_attention(query, keys, values, 0.3, causal=causal)
    for row in range(2):
        for head in range(3):
            own = query[row, head], keys[row, head], values[row, head]
            expected, norms = slow(*own, 0.3, causal)
            torch.testing.assert_close(out[row, head], expected, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(lse[row, head], norms, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_queries_of_a_group_read_the_keys_of_their_head(dtype):
    query = drawn(2, 2, 3, 1, 8, seed=4, dtype=dtype)
    keys, values = (drawn(2, 2, 40, 8, seed=seed, dtype=dtype) for seed in (5, 6))
    out, lse = fused_group_attention(query, keys, values, 0.5)
    assert out.shape == query.shape
    assert lse.shape == (2, 2, 3, 1)
    assert lse.dtype == torch.float32
    close = 1e-5 if dtype.itemsize >= 4 else 2e-2
    for row in range(2):
        for head in range(2):
            for member in range(3):
                own = query[row, head, member], keys[row, head], values[row, head]
                expected, norms = slow(*own, 0.5)
                found = out[row, head, member].float(), lse[row, head, member]
                torch.testing.assert_close(found[0], expected, atol=close, rtol=close)
                torch.testing.assert_close(found[1], norms, atol=close, rtol=close)


def test_what_the_kernel_does_not_attend():
    query, keys, values = (drawn(1, 1, 4, 8, seed=seed) for seed in range(3))
    assert not can_fuse(query, keys, values[..., :6])
    assert not can_fuse(query, keys.bfloat16(), values)
    assert not can_fuse(query.requires_grad_(), keys, values)
    with torch.no_grad():
        assert can_fuse(query, keys, values)
    assert not can_fuse(query.to("meta"), keys, values)


def test_vectors_in_pieces_and_no_keys_are_not_attended():
    query, keys, values = (drawn(1, 1, 4, 8, seed=seed) for seed in range(3))
    for i in range(3):
        tensors = [query, keys, values]
        tensors[i] = tensors[i].transpose(2, 3).contiguous().transpose(2, 3)
        assert not can_fuse(*tensors)
    assert not can_fuse(query, keys[:, :, :0], values[:, :, :0])
