"""CAOTE and FastCAOTE."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool import parse_policy
from kvtool.errors import UsageError
from kvtool.policies.rescore.caote import distance_from_mean, normalised, output_change
from tests.policies.trial import FIXTURE, VALUES, Trial, Twin, one_head, random_pair
from tests.reference.caote import caote_scores


def product_scores(scores, values, fast=False):
    """The product's formula on lists."""
    scores = torch.tensor([[scores]], dtype=torch.float32)
    values = torch.tensor([[values]], dtype=torch.float32)
    weights = normalised(scores, scores.shape[-1])
    centre = normalised(torch.zeros_like(scores), scores.shape[-1]) if fast else weights
    return output_change(weights, distance_from_mean(centre, values))[0, 0].tolist()


WORKED = [
    # o = .4 [1, 0] + .1 [0, 4] + .3 [1, 1] + .2 [2, 0] = [1.1, .7];
    # c_0 = .4 / .6 * |[.1, .7]| = .471405
    ("tova", "caote", [0.471405, 0.386501, 0.135526, 0.285044], 2),
    # mean value [1, 1.25]; c_0 = .4 / .6 * 1.25 = .833333
    ("tova", "fastcaote", [0.833333, 0.325131, 0.107143, 0.400195], 2),
    # shares 2.5 / 4, .7 / 4, .6 / 4, .2 / 4; o = [.875, .85]
    ("h2o(recent=1)", "caote", [1.431903, 0.693481, 0.034457, 0.074211], 2),
]


@pytest.mark.parametrize(("base", "modifier", "scores", "victim"), WORKED)
def test_worked_fixture(base, modifier, scores, victim):
    trial = Trial(f"{base}+{modifier}", 3).feed(one_head(FIXTURE), [VALUES])
    torch.testing.assert_close(trial.scores()[0], torch.tensor(scores), atol=2e-6, rtol=0)
    assert trial.victim() == [victim]
    name, options = base.partition("(")[0], {"recent": 1} if "recent" in base else {}
    twin = Twin(name, 3, modifier=modifier, **options).feed(one_head(FIXTURE), [VALUES])
    assert twin.scores()[0].tolist() == pytest.approx(scores, abs=1e-6)
    assert trial.kept() == twin.kept()


def test_worked_group_mean_comes_first():
    # two query heads, one CAOTE of their mean row [.25, .35, .2, .2]
    rows = torch.zeros(1, 2, 4, 4)
    rows[0, :, 3] = torch.tensor([[0.4, 0.1, 0.3, 0.2], [0.1, 0.6, 0.1, 0.2]])
    trial = Trial("tova+caote", 3).feed(rows, [VALUES])
    expected = torch.tensor([[0.535672, 1.370964, 0.154616, 0.492602]])
    torch.testing.assert_close(trial.scores(), expected, atol=2e-6, rtol=0)


def test_is_exactly_the_change_of_the_output():
    # leave out j, renormalise, compare: eight random rows of seven tokens, in float64
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        weights = torch.rand(7, generator=generator, dtype=torch.float64).softmax(0)
        values = torch.randn(7, 5, generator=generator, dtype=torch.float64)
        out = weights @ values
        claimed = caote_scores(weights.tolist(), values.tolist())
        for j in range(7):
            rest = [i for i in range(7) if i != j]
            without = weights[rest] @ values[rest] / weights[rest].sum()
            assert claimed[j] == pytest.approx(float((out - without).norm()), abs=1e-12)
        assert product_scores(weights.tolist(), values.tolist()) == pytest.approx(claimed, rel=1e-5)


def test_a_token_with_nearly_all_weight_keeps_a_true_score():
    # 1 - a = 1e-4 is above the limit: a / (1 - a) is 9999 and |o - v_0| is 1e-4 * sqrt(2)
    scores = product_scores([0.9999, 0.0001], [[1, 0], [0, 1]])
    assert scores[0] == pytest.approx(2**0.5, rel=1e-2)  # 1 - .9999 in float32 has 3 digits
    assert scores[1] == pytest.approx(2**0.5 * 0.0001, rel=1e-2)


@pytest.mark.parametrize("row", [[1.0, 0.0, 0.0], [1 - 1e-7, 5e-8, 5e-8]])
@pytest.mark.parametrize("fast", [False, True])
def test_a_token_with_all_the_weight_is_kept(row, fast):
    values = [[1.0, 2.0], [0.0, 1.0], [3.0, 3.0]]
    assert product_scores(row, values, fast)[0] == float("inf")
    assert caote_scores(row, values, fast)[0] == float("inf")


def test_scores_that_are_all_zero_count_alike():
    # equal shares 1/4 of each: c_j = 1/3 * |mean - v_j|, |[1, 1.25] - [0, 4]| = sqrt(8.5625)
    scores = product_scores([0.0] * 4, VALUES)
    assert scores == pytest.approx(caote_scores([0.0] * 4, VALUES), rel=1e-6)
    assert scores == pytest.approx([1.25 / 3, 0.975392, 0.25 / 3, 0.533594], rel=1e-5)


BASES = [
    ("scissorhands", {"recent": 2}),
    ("h2o", {"recent": 2}),
    ("tova", {}),
    ("roco", {"scope": 2, "protect_recent": 1, "sinks": 1}),
    ("snapkv", {"window": 2, "kernel": 3}),
]


@pytest.mark.parametrize(("base", "options"), BASES, ids=[name for name, _ in BASES])
@pytest.mark.parametrize("modifier", ["caote", "fastcaote"])
@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), blocks=st.lists(st.integers(1, 5), min_size=2, max_size=3))
def test_scores_and_choice_equal_the_slow_twin(base, options, modifier, seed, blocks):
    trial, twin = random_pair(seed, blocks, 5, base, modifier, **options)
    torch.testing.assert_close(trial.scores(), twin.scores(), atol=1e-5, rtol=1e-4)
    if sum(blocks) > 5:
        assert trial.protected() == twin.protected()
        assert trial.kept() == twin.kept()


def test_the_same_values_tie_and_the_lower_position_stays():
    # every c is 0, so the base score decides nothing
    trial = Trial("tova+caote", 3).feed(one_head(FIXTURE), [[[1, 2]] * 4])
    assert trial.scores().tolist() == [[0, 0, 0, 0]]
    assert trial.victim() == [3]
    assert trial.kept() == [[0, 1, 2]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_are_read_in_float32(dtype):
    # |v|^2 of 300 would overflow float16
    weights = torch.tensor([[[0.5, 0.25, 0.25]]])
    values = torch.tensor([[[[300.0], [-300.0], [0.0]]]], dtype=dtype)
    assert distance_from_mean(weights, values).isfinite().all()
    assert distance_from_mean(weights, values).dtype == torch.float32


def test_long_caches_are_walked_in_pieces():
    weights = torch.rand(1, 1, 8195).softmax(-1)
    values = torch.randn(1, 1, 8195, 2)
    whole = (values - weights[..., None, :] @ values).norm(dim=-1)
    torch.testing.assert_close(distance_from_mean(weights, values), whole)


@pytest.mark.parametrize(
    ("base", "modifier"), [("full", "caote"), ("random", "fastcaote"), ("recency", "caote")]
)
def test_refuses_a_base_without_attention(base, modifier):
    with pytest.raises(UsageError, match=f"`{modifier}` weighs values by attention scores"):
        parse_policy(f"{base}+{modifier}")


def test_refuses_both_and_twice():
    with pytest.raises(UsageError, match="`caote` and `fastcaote` exclude each other"):
        parse_policy("h2o+caote+fastcaote")
    with pytest.raises(UsageError, match="modifier `caote` is given twice"):
        parse_policy("h2o+caote+caote")
