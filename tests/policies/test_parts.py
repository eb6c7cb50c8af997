"""The roles: what a policy says of itself is general, and the rest follows from its parts."""

from typing import ClassVar, get_origin, get_type_hints

import pytest

from kvtool.errors import UsageError
from kvtool.policies.evicted.eviction import SelectOnly
from kvtool.policies.grammar import parse_policy
from kvtool.policies.parts import Score
from kvtool.policies.policy import Policy
from kvtool.policies.read.quest import Quest
from kvtool.policies.scores.h2o import H2O
from kvtool.policies.scores.rocketkv import RocketKVMT
from kvtool.policies.scores.snapkv import SnapKV
from kvtool.policies.table import BASES, policy_class

SCORES = [cls for cls in map(policy_class, BASES) if issubclass(cls, Score)]


def test_no_flag_is_for_one_policy_alone():
    hints = get_type_hints(Score)
    flags = [name for name, kind in hints.items() if get_origin(kind) is ClassVar]
    flags = [name for name in flags if isinstance(getattr(Score, name, None), bool)]
    assert flags
    for flag in flags:
        users = [cls.name for cls in SCORES if getattr(cls, flag) != getattr(Score, flag)]
        assert len(users) != 1, f"only {users[0]} has {flag}"


@pytest.mark.parametrize(
    ("policy", "traffic", "two_stages", "selects", "stores_all"),
    [
        (parse_policy("snapkv"), False, False, False, False),
        (parse_policy("adakv"), False, False, False, False),
        (parse_policy("quest"), True, False, False, True),
        (parse_policy("quest(k=4)"), True, False, False, True),
        (parse_policy("rocketkv"), True, True, False, False),
        (parse_policy("rocketkv-mt"), True, True, True, True),
        (Policy(SnapKV(), read=Quest(k=8)), False, False, False, False),
        (parse_policy("h2o"), False, False, False, False),
    ],
    ids=str,
)
def test_parts_tell_what_the_budget_bounds(policy, traffic, two_stages, selects, stores_all):
    assert policy.budget_is_traffic is traffic
    assert policy.two_stages is two_stages
    assert policy.select_only is selects
    assert policy.stores_all is stores_all


def test_nothing_is_kept_for_a_reader_that_is_not_there():
    for score in (SnapKV(), H2O()):
        with pytest.raises(UsageError, match="needs a score that comes with a reader"):
            Policy(score, evicted=SelectOnly())
    assert Policy(RocketKVMT()).on_evict == SelectOnly()
