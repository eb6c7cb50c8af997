import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool import parse_policy
from kvtool.errors import UsageError
from kvtool.policies.scores.roco import attention_deviation, mean_attention
from tests.policies.trial import FIXTURE, Trial, Twin, one_head, random_pair
from tests.reference.policies import Roco


def deviations(trial):
    """(kv_heads, tokens) by position."""
    return trial.by_position(attention_deviation(**trial.state))[0]


def test_worked_means_and_deviations():
    # token 0: (1 + .6 + .5 + .4) / 4 = .625; squares (1 + .36 + .25 + .16) / 4 = .4425,
    #          sqrt(.4425 - .390625) = .227761
    # token 1: (.4 + .2 + .1) / 3 = .233333; squares .21 / 3 = .07, sqrt(.07 - .054444) = .124722
    # token 2: (.3 + .3) / 2 = .3, no deviation. Token 3: .2, one observation
    trial = Trial("roco(scope=1,protect_recent=0,sinks=0)", 3).feed(one_head(FIXTURE))
    means, stds = [0.625, 0.233333, 0.3, 0.2], [0.227761, 0.124722, 0, 0]
    torch.testing.assert_close(trial.scores()[0], torch.tensor(means), atol=1e-6, rtol=0)
    torch.testing.assert_close(deviations(trial)[0], torch.tensor(stds), atol=1e-6, rtol=0)
    twin = Twin("roco", 3, scope=1, protect_recent=0, sinks=0).feed(one_head(FIXTURE))
    assert twin.scores()[0].tolist() == pytest.approx(means, abs=1e-6)
    assert [twin.policy.std(0, p) for p in range(4)] == pytest.approx(stds, abs=1e-6)


def test_worked_literal_rule_evicts_the_newest_token():
    # token 0 deviates most and is out of scope; of .233333, .3, .2 the newest is the least
    trial = Trial("roco(scope=1,protect_recent=0,sinks=0)", 3).feed(one_head(FIXTURE))
    twin = Twin("roco", 3, scope=1, protect_recent=0, sinks=0).feed(one_head(FIXTURE))
    assert trial.victim() == [3]
    assert trial.kept() == twin.kept() == [[0, 1, 2]]


def test_worked_protected_recent_token_moves_the_loss():
    trial = Trial("roco(scope=1,protect_recent=1,sinks=0)", 3).feed(one_head(FIXTURE))
    twin = Twin("roco", 3, scope=1, protect_recent=1, sinks=0).feed(one_head(FIXTURE))
    assert trial.victim() == [1]
    assert trial.kept() == twin.kept() == [[0, 2, 3]]


def test_worked_block():
    # so far sums [1.2, .4], counts [2, 1]; the block adds .9, .5, .3, .3 and 2, 2, 2, 1 rows:
    # 2.1 / 4 = .525, .9 / 3 = .3, .3 / 2 = .15, .3 / 1 = .3
    block = [[0.5, 0.3, 0.2, 0], [0.4, 0.2, 0.1, 0.3]]
    trial, twin = Trial("roco(sinks=0)", 3), Twin("roco", 3, sinks=0)
    for both in (trial, twin):
        both.feed(one_head([[1.0, 0.0], [0.2, 0.4]])).feed(one_head(block))
        torch.testing.assert_close(both.scores(), torch.tensor([[0.525, 0.3, 0.15, 0.3]]))
    assert trial.state["count"][0, 0].tolist() == [4, 3, 2, 1]
    torch.testing.assert_close(
        trial.state["attention_sum"][0, 0], torch.tensor([2.1, 0.9, 0.3, 0.3])
    )


def test_one_observation_deviates_by_nothing():
    one, several = torch.tensor([0.3]), torch.tensor([1.0])
    assert attention_deviation(one, one.square(), several).tolist() == [0.0]
    assert mean_attention(torch.zeros(1), torch.zeros(1)).tolist() == [0.0]
    # rounding may put the variance below zero: 3 times .1
    third = torch.full((3,), 0.1)
    assert attention_deviation(third.sum(), third.square().sum(), torch.tensor(3.0)) >= 0


@settings(max_examples=30)
@given(
    st.integers(0, 10_000),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.integers(0, 5),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(1, 4),
)
def test_scores_and_choice_equal_the_slow_twin(seed, blocks, scope, recent, sinks, spare):
    options = {"scope": scope, "protect_recent": recent, "sinks": sinks}
    budget = recent + sinks + spare
    trial, twin = random_pair(seed, blocks, budget, "roco", **options)
    torch.testing.assert_close(trial.scores(), twin.scores())
    positions = range(sum(blocks))
    expected = torch.tensor([[twin.policy.std(head, p) for p in positions] for head in range(2)])
    # the difference of two squares of about 1 loses what float32 cannot hold: sqrt(1e-7)
    torch.testing.assert_close(deviations(trial), expected, atol=4e-4, rtol=0)
    if sum(blocks) > budget:
        assert trial.protected() == scopes(trial, twin)
        chosen = [
            sorted(forced | set(best(trial.scores()[head], forced, budget)))
            for head, forced in enumerate(trial.protected())
        ]
        assert trial.kept() == chosen


def scopes(trial, twin):
    """What the slow twin protects, given the product's own deviations."""
    victims = trial.seen - trial.budget
    own = deviations(trial)
    told = Roco(
        trial.budget,
        scope=twin.policy.scope,
        protect_recent=twin.policy.protect_recent,
        sinks=twin.policy.sinks,
    )
    told.std = lambda head, position: float(own[head, position])
    return [told.forced(head, list(range(trial.seen)), victims) for head in range(2)]


def best(scores, forced, budget):
    free = [p for p in range(len(scores)) if p not in forced]
    return sorted(free, key=lambda p: (-float(scores[p]), p))[: budget - len(forced)]


def test_equal_deviations_leave_the_later_token_in_scope():
    # every token has the same row, so all deviate equally: 0, 1 and 2 are excluded, by position
    rows = torch.full((1, 1, 7, 7), 0.125).tril()
    trial = Trial("roco(scope=3,protect_recent=0,sinks=0)", 6).feed(rows)
    assert trial.protected() == [{0, 1, 2}]
    assert trial.victim() == [6]


def test_the_scope_shrinks_to_what_leaves_enough_victims():
    # 7 slots, budget 3: 4 victims; 1 sink and 1 recent leave 5, so the scope is 1, not 5
    trial, twin = random_pair(3, [7], 3, "roco", scope=5, protect_recent=1, sinks=1)
    assert [len(forced) for forced in trial.protected()] == [3, 3]
    assert trial.kept() == twin.kept()


def test_defaults_follow_the_budget():
    # scope 20 // 2 = 10, recent min(10, 20 // 4) = 5, sinks 4
    trial, twin = random_pair(4, [23], 20, "roco")
    for forced in trial.protected():
        assert {0, 1, 2, 3, 18, 19, 20, 21, 22} <= forced
        assert len(forced) == 4 + 5 + 10
    assert trial.protected() == twin.protected()
    assert parse_policy("roco").score.reserved(60) == {"sinks": 4, "protect_recent": 10}


def test_refuses_protection_that_fills_the_budget():
    with pytest.raises(UsageError, match=r"budget 5 is not above sinks 4 \+ protect_recent 1 = 5"):
        parse_policy("roco").check_budget(5)
    with pytest.raises(UsageError, match="roco: scope must be 0 or more, got -1"):
        parse_policy("roco(scope=-1)")
