import pytest

import kvtool
from kvtool.policies.read.exact_topk import ExactTopK
from kvtool.policies.read.view import StepBudget
from tests.policies.read.trial import KEYS, QUERIES, VALUES, chosen, random_case
from tests.reference import readers


def test_the_worked_example():
    # probabilities [.656, .044, .005, .295] and [.192, .286, .173, .349]
    assert chosen(ExactTopK(k=2), QUERIES, KEYS, VALUES) == [[0, 3], [1, 3]]
    assert chosen(ExactTopK("group", k=2), QUERIES, KEYS, VALUES) == [[0, 3]] * 2


@pytest.mark.parametrize("scope", ["query_head", "group"])
def test_equals_the_slow_twin(scope):
    twin = readers.ExactTopK(9, scope)
    for seed in range(8):
        case = random_case(seed, grain=2 if seed % 2 else None)
        expected = [sorted(row) for row in twin.chosen(*case[:2])]
        assert chosen(ExactTopK(scope, k=9), *case) == expected


def test_ties_go_to_the_lower_position():
    keys = [[0.0, 1.0]] * 5 + [[1.0, 0.0]] * 3
    assert chosen(ExactTopK(k=5), [[1.0, 0.0]], keys, keys) == [[0, 1, 5, 6, 7]]


def test_the_budget_is_what_is_attended_to():
    assert ExactTopK().sized(StepBudget(64, 1000, 16)).k == 64
    assert ExactTopK(k=9).sized(StepBudget(64, 1000, 16)).k == 9


def test_refusals():
    with pytest.raises(kvtool.UsageError, match="exact-topk: k must be 1 or more, got 0"):
        kvtool.parse_policy("exact-topk(k=0)")
    with pytest.raises(kvtool.UsageError, match="scope must be one of query_head, group"):
        kvtool.parse_policy("exact-topk(scope=layer)")
    with pytest.raises(kvtool.UsageError, match="skip_layers must be 0 or more, got -1"):
        kvtool.parse_policy("exact-topk(skip_layers=-1)")
