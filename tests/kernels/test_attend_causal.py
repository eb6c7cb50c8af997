"""Whole prompts by torch's own kernels of a GPU, which have substitutes elsewhere."""

import pytest
import torch

from kvtool.kernels import reference
from tests.kernels import torch_kernels
from tests.kernels.drawn import DEVICE, TOLERANCE

pytest.importorskip("triton")

from kvtool.kernels.attend_causal import attend_causal


@pytest.mark.parametrize(
    ("dtype", "dims", "kernel"),
    [
        (torch.bfloat16, (64, 64), "flash"),
        (torch.float16, (24, 24), "flash"),
        (torch.float16, (256, 256), "flash"),
        (torch.bfloat16, (264, 264), "efficient"),
        (torch.bfloat16, (48, 32), "efficient"),
        (torch.float32, (16, 16), "efficient"),
    ],
    ids=str,
)
@pytest.mark.parametrize("group", [1, 3])
def test_output_and_log_sum_exp_are_those_of_plain_torch(monkeypatch, dtype, dims, kernel, group):
    asked = []
    if DEVICE == "cpu":
        torch_kernels.put_in_place(
            monkeypatch, lambda own: lambda *a, **kw: asked.append(own.__name__) or own(*a, **kw)
        )
    generator = torch.Generator().manual_seed(sum(dims))
    sizes = (41, 2 * group, dims[0]), (41, 2, dims[0]), (41, 2, dims[1])
    query, key, value = (
        torch.randn(2, *size, generator=generator).to(DEVICE, dtype).transpose(1, 2)
        for size in sizes
    )
    order = torch.arange(41, device=DEVICE)
    places = order.expand(2, -1), order.expand(2, 1, -1)
    out, lse = attend_causal(query, key, value, scale=dims[0] ** -0.5)
    expected = reference.attend_rows(
        query.float(), key.float(), value.float(), *places, scale=dims[0] ** -0.5
    )
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(out.float(), expected[0], **close)
    torch.testing.assert_close(lse, expected[1], **close)
    assert lse.is_contiguous()  # `column_sums` reads it line by line
    assert out.dtype == dtype
    assert asked == ([kernel] if DEVICE == "cpu" else [])
