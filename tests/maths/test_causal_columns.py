"""Columns from the log-sum-exp against the explicit softmax, in float64."""

import pytest
import torch

from kvtool.maths import statistics
from kvtool.maths.columns import COLUMNS
from kvtool.maths.statistics import add_causal_columns


def drawn(kv_heads, group, n, dim, *, size=1.0, seed=0):
    """Random queries and keys, their explicit weights and log-sum-exp in float64."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(kv_heads, group, n, dim, generator=generator) * size
    key = torch.randn(kv_heads, n, dim, generator=generator) * size
    return query, key


def explicit(query, key, scale):
    logits = query.double() @ key.double()[:, None].transpose(2, 3) * scale
    later = torch.ones(key.shape[1], key.shape[1], dtype=torch.bool).triu(1)
    logits.masked_fill_(later, float("-inf"))
    return logits.softmax(-1), logits.logsumexp(-1)


def expected_columns(weights):
    """Every column by its definition: (kv_heads, n) each."""
    mean, n = weights.mean(1), weights.shape[-1]
    seen = torch.arange(1, n + 1)[:, None]
    visible = torch.ones(n, n).tril().expand_as(mean)
    return {
        "attention_sum": mean.sum(1),
        "square_sum": mean.square().sum(1),
        "count": visible.sum(1),
        "above_average": (mean * seen >= 1 - 2e-5).sum(1),
    }


def just_average(weights):
    """How many weights on each column, but of the first row, rounding may put on either side."""
    shares = weights.mean(1) * torch.arange(1, weights.shape[-1] + 1)[:, None]
    return ((shares - 1).abs() <= 2e-5)[:, 1:].sum(1)


def check(query, key, scale, names=COLUMNS, apart=True):
    weights, lse = explicit(query, key, scale)
    kv_heads, group, n, _ = query.shape
    start = {name: torch.rand(kv_heads, n) for name in names}
    sums = {name: total.clone() for name, total in start.items()}
    by_head = torch.ones(kv_heads, group, n) if apart else None
    add_causal_columns(sums, by_head, query, key, lse.float(), scale=scale)
    wanted = expected_columns(weights)
    for name in names:
        found = sums[name] - start[name]
        if name == "above_average":
            missing = wanted[name] - found
            assert ((missing > -1e-3) & (missing < just_average(weights) + 1e-3)).all()
            assert just_average(weights).sum() <= 2e-4 * n * n + 1
            continue
        torch.testing.assert_close(found, wanted[name].float(), atol=1e-4, rtol=1e-5)
    if by_head is not None:
        torch.testing.assert_close(by_head - 1, weights.sum(2).float(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("rows", "keys"), [(8, 8), (12, 5), (5, 16), (1, 1), (512, 512)])
def test_tiles_of_any_size_add_up_to_the_explicit_sums(monkeypatch, rows, keys):
    """Tiles that the diagonal cuts once, twice, or not at the edge of a group's rows."""
    monkeypatch.setattr(statistics, "_TILE_ROWS", rows)
    monkeypatch.setattr(statistics, "_TILE_KEYS", keys)
    for group, n in ((1, 1), (4, 2), (3, 7), (4, 16), (1, 17), (3, 17), (4, 29)):
        check(*drawn(2, group, n, 7, seed=n), 0.3)


@pytest.mark.parametrize(
    ("names", "apart"),
    [
        *((("attention_sum",), True), (("attention_sum",), False), (("above_average",), True)),
        *((("attention_sum", "square_sum", "count"), False), ((), True)),
    ],
)
def test_every_choice_of_columns(names, apart):
    check(*drawn(2, 4, 530, 16), 0.25, names, apart)  # more than one tile as they are


def test_keys_that_come_later_may_be_of_any_size():
    """Their logits lie above the log-sum-exp of a row, where exp overflows: they are not seen."""
    query, key = drawn(1, 2, 40, 8)
    key[:, 20:] = query[:, 0, :20] * 400
    weights, lse = explicit(query, key, 1.0)
    sums = {name: torch.zeros(1, 40) for name in COLUMNS}
    add_causal_columns(sums, None, query, key, lse.float(), scale=1.0)
    for name, wanted in expected_columns(weights).items():
        if name != "above_average":
            torch.testing.assert_close(sums[name], wanted.float(), atol=1e-2, rtol=1e-3)
        assert sums[name].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    query, key = drawn(2, 2, 90, 16)
    check(query.to(dtype), key.to(dtype), 0.25)


@pytest.mark.parametrize("n", [1, 3, 333])
def test_an_even_row_is_above_average_everywhere(n):
    """Keys that are all alike, with logits far from 0: rounding decides nothing."""
    query, key = drawn(1, 2, n, 64)
    key[:] = key[:, :1]
    lse = explicit(query, key, 1.0)[1].float()
    sums = {"above_average": torch.zeros(1, n)}
    add_causal_columns(sums, None, query, key, lse, scale=1.0)
    assert sums["above_average"][0].tolist() == list(range(n, 0, -1))


def test_nothing_that_is_given_changes():
    query, key = drawn(1, 2, 30, 8)
    lse = explicit(query, key, 0.5)[1].float()
    before = [each.clone() for each in (query, key, lse)]
    sums = {name: torch.zeros(1, 30) for name in COLUMNS}
    add_causal_columns(sums, None, query, key, lse, scale=0.5)
    assert all(torch.equal(a, b) for a, b in zip((query, key, lse), before, strict=True))
