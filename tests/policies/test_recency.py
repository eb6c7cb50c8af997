import pytest

from kvtool import parse_policy
from kvtool.errors import UsageError
from tests.policies.trial import FIXTURE, Trial, one_head, random_pair


def test_worked_fixture():
    trial = Trial("recency", 3).feed(one_head(FIXTURE))
    assert trial.scores().tolist() == [[0, 1, 2, 3]]
    assert trial.victim() == [0]
    assert trial.kept() == [[1, 2, 3]]


@pytest.mark.parametrize("blocks", [[7], [3, 5], [1, 1, 7]])
def test_kept_equal_the_slow_twin(blocks):
    trial, twin = random_pair(1, blocks, 5, "recency")
    assert trial.kept() == twin.kept()


def test_refuses_parameters_and_modifiers():
    with pytest.raises(UsageError, match="`recency` has no parameter `sinks`"):
        parse_policy("recency(sinks=4)")
    with pytest.raises(UsageError, match="`recency` has none"):
        parse_policy("recency+fastcaote")
    with pytest.raises(UsageError, match="budget must be 1 token or more, got 0"):
        parse_policy("recency").check_budget(0)
