import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool import parse_policy
from kvtool.errors import UsageError
from tests.policies.trial import FIXTURE, Trial, Twin, causal_rows, one_head, random_pair


def test_worked_counts():
    # row 0 (1 key, average 1): token 0. Row 1 (average 1/2): .6 yes, .4 no.
    # Row 2 (1/3): .5 yes, .2 and .3 no. Row 3 (1/4): .4 yes, .1 no, .3 yes, .2 no.
    trial = Trial("scissorhands(recent=1)", budget=3).feed(one_head(FIXTURE))
    assert trial.scores().tolist() == [[4, 0, 1, 0]]
    # token 3 would tie with token 1, but it is the recent one
    assert trial.victim() == [1]
    twin = Twin("scissorhands", 3, recent=1).feed(one_head(FIXTURE))
    assert twin.scores().tolist() == [[4, 0, 1, 0]]
    assert trial.kept() == twin.kept() == [[0, 2, 3]]


def test_worked_block_adds_to_what_was_there():
    # counts so far [2, 1]. First new row, 3 keys, average 1/3: .5 yes, .3 no, .2 no.
    # Second, 4 keys, average 1/4: .4 yes, .2 no, .1 no, .3 yes.
    trial = Trial("scissorhands(recent=1)", budget=3)
    twin = Twin("scissorhands", 3, recent=1)
    for both in (trial, twin):
        both.feed(one_head([[1.0, 0.0], [0.5, 0.5]]))
        assert both.scores().tolist() == [[2, 1]]
        both.feed(one_head([[0.5, 0.3, 0.2, 0], [0.4, 0.2, 0.1, 0.3]]))
        assert both.scores().tolist() == [[4, 1, 0, 1]]
    assert trial.victim() == [2]


@pytest.mark.parametrize("keys", [3, 7, 25, 41, 47])
def test_a_weight_equal_to_the_average_counts(keys):
    # 1/25, 1/41 and 1/47 in float32 lie below the true fractions
    weights = torch.full((1, 2, 1, keys), 1 / keys)
    before = torch.zeros(1, 2, keys - 1, keys - 1)
    trial = Trial("scissorhands", budget=2).feed(before).feed(weights)
    assert trial.scores().tolist() == [[1.0] * keys]


def test_the_group_is_averaged_before_the_threshold():
    # heads give token 0 .9 and .2; the mean .55 is above 1/2 and counts once, not .5 times
    weights = [[[[1.0, 0.0], [0.9, 0.1]], [[1.0, 0.0], [0.2, 0.8]]]]
    trial = Trial("scissorhands", budget=2).feed(weights)
    assert trial.scores().tolist() == [[2, 0]]


@settings(max_examples=25)
@given(
    st.integers(0, 10_000), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 6)
)
def test_scores_and_choice_equal_the_slow_twin(seed, blocks, recent):
    trial, twin = random_pair(seed, blocks, recent + 1, "scissorhands", grain=8, recent=recent)
    assert torch.equal(trial.scores(), twin.scores())
    if sum(blocks) > recent + 1:
        assert trial.protected() == twin.protected()
        assert trial.kept() == twin.kept()


def test_the_recent_window_is_half_of_the_budget_unless_given():
    trial = Trial("scissorhands", 7).feed(causal_rows(torch.Generator(), 1, 1, 11, 11))
    assert trial.protected() == [{8, 9, 10}]  # 7 // 2 = 3


def test_refuses_a_window_as_large_as_the_budget():
    with pytest.raises(UsageError, match="budget 5 is not above recent 6"):
        parse_policy("scissorhands(recent=6)").check_budget(5)
    with pytest.raises(UsageError, match="scissorhands: recent must be 0 or more, got -2"):
        parse_policy("scissorhands(recent=-2)")
