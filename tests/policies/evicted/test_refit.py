"""Refit: the worked example, what must hold of the fit, and what is refused."""

import re
from dataclasses import replace

import pytest
import torch

from kvtool import parse_policy
from kvtool.errors import UsageError
from kvtool.maths.refit import value_change
from kvtool.policies.evicted.eviction import Eviction
from kvtool.policies.evicted.refit import Refit
from kvtool.policies.evidence import PromptQueries
from kvtool.policies.policy import check_blocks, reads_whole
from tests.reference import refit as slow

KEYS = torch.tensor(
    [[1.0, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 1], [2, 0, 0, 0], [0, 0, 1, 1], [0, 2, 0, 0]]
)
VALUES = torch.tensor([[1.0, 0], [0, 2], [3, 0], [0, 1], [1, 1], [2, 2]])
QUERIES = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]])
KEPT, EVICTED, ALL = [0, 2, 4, 5], [1, 3], list(range(6))
FITTED = torch.tensor(
    [[-0.674990, 0.599575], [3.321926, -0.035673], [0.940382, 1.290648], [0.802873, 2.199242]]
)


def leave(kept=KEPT, places=(5, 5, 5), values=VALUES, evicted=EVICTED):
    """One head that loses some of six tokens, and three queries at some places."""
    index = torch.tensor(kept)
    return Eviction(
        keys=KEYS[None, None],
        values=values[None, None],
        state={},
        evicted=torch.tensor([[evicted]]).clamp(min=0),
        evicted_positions=torch.tensor([[evicted]], dtype=torch.int32),
        kept_keys=KEYS[index][None, None],
        kept_values=values[index][None, None].clone(),
        kept_state={},
        kept_positions=torch.tensor([[kept]], dtype=torch.int32),
        tokens_seen=6,
        layer=0,
        importance=torch.zeros(1, 1, 6),
        queries=PromptQueries(
            query=QUERIES[None, None],
            positions=torch.tensor([places]),
            scale=0.5,
            slots=torch.tensor([[ALL]], dtype=torch.int32),
        ),
    )


def error(values):
    """How far the outputs of the kept tokens are from those of all."""
    rows = torch.softmax(QUERIES @ KEYS.T / 2, -1), torch.softmax(QUERIES @ KEYS[KEPT].T / 2, -1)
    return (rows[1] @ values - rows[0] @ VALUES).norm().item()


def test_worked_example():
    eviction = leave()
    assert Refit().absorb({}, eviction).tolist() == [[[True, True]]]
    torch.testing.assert_close(eviction.kept_values[0, 0], FITTED, atol=1e-5, rtol=0)
    assert torch.equal(eviction.kept_keys[0, 0], KEYS[KEPT])
    assert error(VALUES[KEPT]) == pytest.approx(1.264783, abs=1e-5)
    assert error(eviction.kept_values[0, 0]) == pytest.approx(0.028182, abs=1e-5)
    rows = torch.softmax(QUERIES @ KEYS[KEPT].T / 2, -1)
    assert 0.01 * rows.square().sum().item() / 4 == pytest.approx(0.002072074, abs=1e-8)


@pytest.mark.parametrize("places", [(5, 5, 5), (1, 3, 4), (0, 2, 5)])
@pytest.mark.parametrize("ridge", [0.01, 1.0])
def test_queries_see_what_they_saw_in_the_prompt(places, ridge):
    eviction = leave(places=places)
    Refit(ridge=ridge).absorb({}, eviction)
    rows = [(p, q, None) for p, q in zip(places, QUERIES.tolist(), strict=True)]
    given = ({p: each[p].tolist() for p in ALL} for each in (KEYS, VALUES))
    expected = slow.refit(rows, *given, KEPT, ridge, 0.5)
    torch.testing.assert_close(
        eviction.kept_values[0, 0], torch.tensor([expected[p] for p in KEPT]), atol=1e-5, rtol=1e-5
    )


def test_a_query_that_sees_nothing_that_stays_has_no_say():
    eviction, without = leave(kept=[4, 5], places=(1, 5, 5)), leave(kept=[4, 5], places=(-1, 5, 5))
    for each in (eviction, without):
        Refit().absorb({}, each)
    assert torch.equal(eviction.kept_values, without.kept_values)
    assert torch.isfinite(eviction.kept_values).all()


def test_without_a_query_or_an_evicted_token_nothing_changes():
    for eviction in (leave(places=(-1, -1, -1)), leave(kept=ALL, evicted=[-1, -1])):
        before = eviction.kept_values.clone()
        assert not Refit().absorb({}, eviction).any()
        assert torch.equal(eviction.kept_values, before)


def test_empty_slots_neither_change_nor_count():
    short, padded = leave(), leave(kept=[*KEPT, 0, 0])
    positions = torch.tensor([[[*KEPT, -1, -1]]], dtype=torch.int32)
    padded = replace(padded, kept_positions=positions)
    for each in (short, padded):
        Refit().absorb({}, each)
    torch.testing.assert_close(padded.kept_values[:, :, :4], short.kept_values)
    assert torch.equal(padded.kept_values[0, 0, 4:], VALUES[[0, 0]])


def test_both_systems_have_one_solution():
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(2, 3, 7, 5, generator=generator)
    missing = torch.randn(2, 3, 7, 4, generator=generator)
    kept = torch.full((2, 3), 5)
    many = value_change(weights, missing, kept, 0.1)
    zeros = torch.zeros(2, 3, 7, 9)
    few = value_change(torch.cat([weights, zeros], -1), missing, kept, 0.1)
    torch.testing.assert_close(few[:, :, :5], many)
    assert torch.equal(few[:, :, 5:], torch.zeros_like(few[:, :, 5:]))


def test_many_tokens_that_all_rows_share_do_not_break_the_solution():
    """All weight on one token, and thousands kept: rounding in float32 would exceed the penalty."""
    weights = torch.full((1, 256, 20_000), 1e-9)
    weights[..., 0] = 1
    change = value_change(weights, torch.ones(1, 256, 2), torch.tensor([20_000]), 0.01)
    assert torch.isfinite(change).all()
    torch.testing.assert_close(change[0, 0], torch.ones(2).double(), atol=1e-5, rtol=0)


def test_values_in_half_precision_are_fitted_in_more():
    exact, half = leave(), leave(values=VALUES.bfloat16())
    half = replace(half, keys=half.keys.bfloat16(), kept_keys=half.kept_keys.bfloat16())
    for each in (exact, half):
        Refit().absorb({}, each)
    assert half.kept_values.dtype == torch.bfloat16
    assert torch.equal(half.kept_values, exact.kept_values.bfloat16())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("full+refit", "`refit` makes something of evicted tokens, and `full` evicts none"),
        ("h2o+refit", "once, when a prompt is cut, and `h2o` evicts while it decodes"),
        ("duoattention+refit", "and `duoattention` evicts while it decodes"),
        ("snapkv+every+refit", "and `every` cuts again while tokens are decoded"),
        ("d2o(merge=none)+refit", "and `d2o` evicts while it decodes"),
        ("sirllm+refit", "and `sirllm` cuts all layers at once"),
        ("quest+refit", "`quest` keeps everything and chooses what is read; `refit` has nothing"),
        ("rocketkv+refit", "the budget of `rocketkv` is what a step reads"),
        ("snapkv+refit+cam", "modifiers `refit` and `cam` exclude each other"),
        ("snapkv+refit(queries=0)", "refit: queries must be 1 or more, got 0"),
        ("snapkv+refit(ridge=0)", "refit: ridge must be above 0, got 0"),
        ("snapkv+refit(ridge=nan)", "ridge must be a number, got `nan`"),
    ],
)
def test_what_makes_no_sense_is_refused(text, told):
    with pytest.raises(UsageError, match=re.escape(told)):
        parse_policy(text)


def test_blocks_are_refused_with_the_reason():
    policy = parse_policy("snapkv+refit")
    assert reads_whole(policy, planned=False)
    assert reads_whole(policy, planned=True)
    check_blocks(policy, None)
    with pytest.raises(UsageError, match="what its last queries see of all of it, so it cannot"):
        check_blocks(policy, 128)
