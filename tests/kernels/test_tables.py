"""What readers compute over their tables, by kernel, against plain torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.kernels import tables, trust
from kvtool.maths.estimates import page_bounds
from tests.kernels.drawn import DEVICE, TOLERANCE

pytest.importorskip("triton")

from kvtool.kernels import operators

SIZES = {
    "batch": st.integers(1, 2),
    "heads": st.integers(1, 3),
    "group": st.integers(1, 8),
    "dim": st.sampled_from([8, 24, 40]),
    "width": st.integers(1, 150),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    "seed": st.integers(0, 999),
}


def by_both(compute, *args):
    """The kernel's answer and plain torch's."""
    with pytest.MonkeyPatch.context() as patch:
        answers = []
        for usable in (True, False):
            patch.setattr(trust, "usable", lambda *_, usable=usable, **__: usable)
            answers.append(compute(*args))
    return answers


def normal(generator, dtype, *shape):
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@settings(max_examples=7)
@given(**SIZES)
def test_pages_are_scored_as_in_plain_torch(batch, heads, group, dim, width, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    query = normal(generator, dtype, batch, heads, group, dim)
    bounds = normal(generator, dtype, batch, heads, 2 * dim, width + 3)
    found, expected = by_both(tables.page_scores, query, bounds, width)
    assert found.shape == (batch, heads, width)
    tolerance = 4 * TOLERANCE[dtype] * dim**0.5
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=TOLERANCE[dtype])


@settings(max_examples=7)
@given(count=st.integers(1, 20), **SIZES)
def test_rows_are_multiplied_as_in_plain_torch(count, batch, heads, group, dim, width, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    count = min(count, dim)
    part = normal(generator, dtype, batch, heads, group, count)
    table = normal(generator, dtype, batch, heads, dim, width + 3)
    order = torch.rand(batch, heads, dim, generator=generator).argsort(-1)[..., :count]
    found, expected = by_both(tables.row_product, part, table, order.to(DEVICE), width)
    assert found.shape == (batch, heads, group, width)
    tolerance = TOLERANCE[dtype] * (1 + count**0.5)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=TOLERANCE[dtype])


def test_a_page_is_never_scored_below_one_of_its_keys():
    generator = torch.Generator().manual_seed(0)
    keys = normal(generator, torch.float32, 1, 2, 50, 16)
    query = normal(generator, torch.float32, 1, 2, 3, 16)
    found, _ = by_both(tables.page_scores, query, page_bounds(keys, 7), 8)
    logits = torch.einsum("bhgd,bhnd->bhgn", query, keys)
    for page in range(8):
        highest = logits[..., 7 * page : 7 * page + 7].amax(-1).sum(-1)
        assert (found[..., page] >= highest - 1e-4).all()


def test_a_compiled_step_calls_them_as_operators(monkeypatch):
    """One node each, where the kernels can run; their shapes are known without running them."""
    monkeypatch.setattr(trust, "usable", lambda *_, operator=False, **__: operator)
    generator = torch.Generator().manual_seed(0)
    query = normal(generator, torch.float32, 2, 2, 3, 16)
    table = normal(generator, torch.float32, 2, 2, 32, 9)
    rows = torch.rand(2, 2, 16, generator=generator).argsort(-1).to(DEVICE)
    called = []

    def step(query, table, rows):
        return tables.page_scores(query, table, 7), tables.row_product(query, table, rows, 8)

    def backend(module, inputs):
        targets = [str(node.target) for node in module.graph.nodes]
        called.extend(each for each in targets if "kvtool" in each)
        return module

    found = torch.compile(step, fullgraph=True, backend=backend)(query, table, rows)
    assert called == ["kvtool.page_scores.default", "kvtool.row_product.default"]
    for answer, expected in zip(found, step(query, table, rows), strict=True):
        assert torch.equal(answer, expected)
    chosen = torch.tensor([[[3, -1], [0, 1]]]).expand(2, -1, -1).to(DEVICE)
    slots = table.transpose(2, 3).contiguous()[..., :16]
    given = query.flatten(1, 2)[:, :, None], slots, slots, chosen, chosen.clamp(min=0), None
    tests = "test_schema", "test_faketensor"
    for operator, arguments in (
        (operators.page_scores, (query, table, 7)),
        (operators.row_product, (query, table, rows, 8)),
        (operators.attend_chosen, (*given, 0.25, None)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=tests)
