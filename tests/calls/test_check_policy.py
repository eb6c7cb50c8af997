"""The battery for authors of scores: what is right passes, and each broken clause is found."""

from dataclasses import dataclass, replace

import pytest
import torch

import kvtool
from kvtool.calls.check_policy import check_policy
from kvtool.calls.policy_checks import CHECKS, Broken, Subject, attached_model, small_budget
from kvtool.errors import PolicyError, UsageError
from kvtool.policies.policy import Policy
from kvtool.policies.table import BASES
from tests.contract.cases import small
from tests.contract.test_outsiders import Forgetful, Leaky, Loudest
from tests.policies.test_guard import Own, broken
from tests.tiers import first


def held_against(name: str, policy: Policy) -> None:
    """Run one check on a policy."""
    CHECKS[name](Subject(policy, small_budget(policy), attached_model()))


@pytest.mark.parametrize("policy", first(1, [Loudest(), Own(recent=9)]))
def test_a_score_that_keeps_the_contract_passes(policy):
    report = check_policy(policy)
    assert report.passed
    assert report.budget == 20
    assert {each.outcome for each in report.checks} == {"passed"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "text", [name for name in BASES if small(name) != name] + ["snapkv+chunk+int8"]
)
def test_the_policies_of_the_package_pass(text):
    """Those that tests/contract has with smaller settings: some windows are longer than a text."""
    assert check_policy(text, raises=False).failed == ()


def test_one_that_keeps_its_prompt_gets_a_budget_that_fits_it():
    report = check_policy("triattention", raises=False)
    assert report.failed == ()
    assert report.budget == 60


@dataclass(frozen=True)
class BySlot(Own):
    """Rank by slot, which is another one in a file and after decoding."""

    def importance(self, state, view, rows):
        return torch.arange(view.positions.shape[-1]).expand(view.positions.shape).float() % 7


def randomly(self, state, view, rows):
    return torch.rand(view.positions.shape)


def writes_values(self, state, view, rows):
    view.values[0].zero_()
    return state["attention_sum"]


def by_longest_entry(self, state, view, rows):
    return (view.positions.float() - view.positions.max() / 2).abs()


@pytest.mark.parametrize(
    ("check", "policy", "told"),
    [
        ("the same text is cut the same again", broken("importance", randomly), "a second cache"),
        ("a saved cache goes on like the unbroken one", BySlot, "layer 0"),
        (
            "an entry of a padded batch is the entry alone",
            broken("importance", by_longest_entry),
            "entry 1 of 29 tokens: layer 0 keeps the tokens",
        ),
        ("an entry of a padded batch is the entry alone", Leaky, "entry 0 of 48 tokens"),
        (
            "what is protected is reserved",
            broken("reserved", lambda self, budget: {}),
            "4 tokens of a head are protected, and `reserved` counts 0 of a budget of 20",
        ),
        (
            "a budget at its limit is refused or works",
            broken("protected", lambda self, state, view, evicted: view.recent(9)),
            "marks 9 tokens of a head, 4 more than its budget",
        ),
        (
            "it runs and stays finite",
            broken("importance", writes_values),
            "importance writes into what it is shown to read only",
        ),
    ],
)
def test_a_clause_that_is_broken_is_found(check, policy, told):
    with pytest.raises((Broken, PolicyError), match=told):
        held_against(check, Policy(policy()))


@pytest.mark.parametrize(
    "check",
    [
        "a saved cache goes on like the unbroken one",
        "a rollback leaves no trace",
        "the same text is cut the same again",
    ],
)
def test_what_a_score_remembers_beside_the_slots_is_found(check):
    Forgetful.known.clear()
    with pytest.raises((Broken, PolicyError, RuntimeError)):
        held_against(check, Policy(Forgetful()))


def test_an_error_lists_all_that_fails():
    wrong = Policy(broken("reserved", lambda self, budget: {})())
    with pytest.raises(PolicyError, match="fails 2 of 12 checks: ") as raised:
        check_policy(wrong)
    for name in ("what is protected is reserved", "a budget at its limit is refused or works"):
        assert name in raised.value.message
    assert raised.value.exit_code == 1


def test_what_is_no_policy_is_refused():
    with pytest.raises(UsageError, match="a policy is a string or a kvtool policy"):
        kvtool.check_policy(3)
    with pytest.raises(UsageError, match="no policy named"):
        kvtool.check_policy("h3o")


def test_a_budget_that_nobody_can_give_is_refused():
    greedy = broken("reserved", lambda self, budget: {"recent": budget})
    with pytest.raises(UsageError, match="takes no budget from 20 to 4096 tokens"):
        check_policy(replace(kvtool.parse_policy("h2o"), score=greedy()))
