import pytest
import torch

from kvtool import parse_policy
from kvtool.errors import UsageError
from tests.policies.trial import FIXTURE, Trial, Twin, one_head, random_pair


def test_worked_fixture():
    # one sink, budget 3: 0 stays as the sink, 2 and 3 as the newest
    trial = Trial("streaming(sinks=1)", 3).feed(one_head(FIXTURE))
    assert trial.victim() == [1]
    assert trial.kept() == Twin("streaming", 3, sinks=1).feed(one_head(FIXTURE)).kept()


def test_worked_two_sinks_and_the_last_four():
    trial, twin = random_pair(0, [10], 6, "streaming", sinks=2)
    assert trial.kept() == twin.kept() == [[0, 1, 6, 7, 8, 9]] * 2
    assert trial.victim() == [2, 2]  # one at a time: the oldest that is no sink


@pytest.mark.parametrize(("sinks", "blocks"), [(0, [7]), (1, [1, 1, 7]), (4, [3, 5])])
def test_kept_equal_the_slow_twin(sinks, blocks):
    trial, twin = random_pair(1, blocks, 5, "streaming", sinks=sinks)
    assert trial.protected() == twin.protected()
    assert trial.kept() == twin.kept()


def test_four_sinks_unless_given():
    trial, _ = random_pair(2, [11], 7, "streaming")
    assert trial.protected() == [{0, 1, 2, 3}] * 2
    assert trial.kept() == [[0, 1, 2, 3, 8, 9, 10]] * 2


def test_attention_is_not_asked_for():
    trial = Trial("streaming", 5).feed(torch.zeros(1, 1, 7, 7))
    assert trial.state == {}
    assert trial.last is None


def test_refuses_sinks_that_fill_the_budget():
    with pytest.raises(UsageError, match="budget 4 is not above sinks 4"):
        parse_policy("streaming").check_budget(4)
    with pytest.raises(UsageError, match="streaming: sinks must be 0 or more, got -1"):
        parse_policy("streaming(sinks=-1)")
    with pytest.raises(UsageError, match="`caote` weighs values by attention scores"):
        parse_policy("streaming+caote")
