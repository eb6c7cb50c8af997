import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool import parse_policy
from kvtool.errors import UsageError
from tests.policies.trial import FIXTURE, Trial, Twin, causal_rows, one_head, random_pair


def test_worked_column_sums():
    # token 0: 1 + .6 + .5 + .4 = 2.5; 1: .4 + .2 + .1 = .7; 2: .3 + .3 = .6; 3: .2
    trial = Trial("h2o(recent=1)", budget=3).feed(one_head(FIXTURE))
    torch.testing.assert_close(trial.scores(), torch.tensor([[2.5, 0.7, 0.6, 0.2]]))
    # token 3 is the recent one, so .6 is the least that may go
    assert trial.victim() == [2]
    assert trial.kept() == [[0, 1, 3]]
    twin = Twin("h2o", 3, recent=1).feed(one_head(FIXTURE))
    assert twin.kept() == [[0, 1, 3]]
    assert twin.scores()[0].tolist() == pytest.approx([2.5, 0.7, 0.6, 0.2])


def test_worked_block_adds_to_what_was_there():
    # sums so far [1.2, .4]; the block adds .5 + .4, .3 + .2, .2 + .1 and .3
    block = [[0.5, 0.3, 0.2, 0], [0.4, 0.2, 0.1, 0.3]]
    trial = Trial("h2o(recent=1)", budget=3)
    twin = Twin("h2o", 3, recent=1)
    for both in (trial, twin):
        both.feed(one_head([[1.0, 0.0], [0.2, 0.4]])).feed(one_head(block))
        expected = torch.tensor([[2.1, 0.9, 0.3, 0.3]])
        torch.testing.assert_close(both.scores(), expected)
    assert trial.victim() == [2]


@settings(max_examples=25)
@given(
    st.integers(0, 10_000), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 6)
)
def test_scores_and_choice_equal_the_slow_twin(seed, blocks, recent):
    trial, twin = random_pair(seed, blocks, recent + 1, "h2o", grain=16, recent=recent)
    assert torch.equal(trial.scores(), twin.scores())  # multiples of 1/64, so sums are exact
    if sum(blocks) > recent + 1:
        assert trial.protected() == twin.protected()
        assert trial.kept() == twin.kept()


def test_the_order_of_slots_does_not_matter():
    weights = one_head(FIXTURE)
    straight = Trial("h2o(recent=1)", 3).feed(weights)
    shuffled = Trial("h2o(recent=1)", 3, layout=[2, 0, 3, 1]).feed(weights)
    assert torch.equal(straight.scores(), shuffled.scores())
    assert shuffled.kept() == straight.kept()
    assert shuffled.victim() == straight.victim()


def test_the_recent_window_is_half_of_the_budget_unless_given():
    trial = Trial("h2o", budget=7).feed(causal_rows(torch.Generator(), 1, 1, 11, 11))
    assert trial.protected() == [{8, 9, 10}]  # 7 // 2 = 3


def test_refuses_a_window_as_large_as_the_budget():
    with pytest.raises(UsageError, match="budget 8 is not above recent 8"):
        parse_policy("h2o(recent=8)").check_budget(8)
    with pytest.raises(UsageError, match="h2o: recent must be 0 or more, got -1"):
        parse_policy("h2o(recent=-1)")
