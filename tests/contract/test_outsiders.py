"""A base that is in the table and nowhere else is swept; one that breaks the contract fails.

The policies are written here. None of the battery's files knows them.
"""

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import pytest
import torch

from kvtool.calls.policy_checks import Broken
from kvtool.policies import table
from kvtool.policies.parts import Evidence, Score
from tests.contract.cases import Case, cases
from tests.contract.checks import CHECKS


@dataclass(frozen=True)
class Loudest(Score):
    """Keep the tokens with the highest single attention weight, and a recent window."""

    recent: int = 5

    name: ClassVar = "loudest"
    paper: ClassVar = "-"
    evidence: ClassVar = Evidence.ALL_ROWS
    statistics: ClassVar = ("loudest",)
    attention: ClassVar = True

    def observe(self, state, view, rows):
        seen = state["loudest"][..., : rows.slots]
        torch.maximum(seen, rows.group_mean().amax(2), out=seen)

    def importance(self, state, view, rows):
        return state["loudest"]

    def protected(self, state, view, victims):
        return view.recent(self.recent)

    def reserved(self, budget):
        return {"recent": self.recent}


class Leaky(Loudest):
    """Rank tokens by what the other rows of a batch attend to as well."""

    def importance(self, state, view, rows):
        return state["loudest"] + state["loudest"].mean(0, keepdim=True).flip(-1)


class Forgetful(Loudest):
    """Remember beside the slots what no file holds."""

    statistics: ClassVar = ()
    known: ClassVar = {}

    def observe(self, state, view, rows):
        now = rows.group_mean().amax(2)
        before = self.known.get(str(view.layer))
        if before is not None and before.shape[0] == now.shape[0]:
            shared = min(before.shape[-1], now.shape[-1])
            now[..., :shared] = torch.maximum(now[..., :shared], before[..., :shared])
        self.known[str(view.layer)] = now

    def importance(self, state, view, rows):
        found = self.known[str(view.layer)]
        return torch.nn.functional.pad(found, (0, view.positions.shape[-1] - found.shape[-1]))


@pytest.fixture
def put_in(monkeypatch):
    """Add a class to the table, as one line, in a module that is not there."""

    def put(policy: type[Score]) -> None:
        module = ModuleType("kvtool.policies.scores.outsider")
        module.Outsider = policy
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(table.BASES, "loudest", "scores.outsider:Outsider")

    return put


def test_a_base_in_the_table_is_swept(put_in):
    before = cases()
    put_in(Loudest)
    (case,) = [case for case in cases() if case.kind == "base" and case not in before]
    assert case.text == "loudest"
    assert any(base == "loudest" for entry in table.describe() for base in entry.goes_on)


@pytest.mark.exhaustive
def test_it_keeps_the_whole_contract(put_in):
    put_in(Loudest)
    for check in CHECKS.values():
        check(Case("loudest", "base"))


@pytest.mark.parametrize(
    ("policy", "found_by"),
    [
        (Leaky, "an_entry_of_a_padded_batch_is_the_entry_alone"),
        (Forgetful, "a_saved_cache_goes_on_like_the_unbroken_one"),
        (Forgetful, "the_same_text_is_cut_the_same_again"),
        (Forgetful, "a_rollback_leaves_no_trace"),
    ],
)
def test_a_base_that_breaks_the_contract_is_found(put_in, policy, found_by):
    put_in(policy)
    with pytest.raises((AssertionError, Broken, RuntimeError)):
        CHECKS[found_by](Case("loudest", "base"))
