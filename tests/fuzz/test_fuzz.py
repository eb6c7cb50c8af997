"""A few inputs of every kind keep the contract; `python -m tests.fuzz` tries many more."""

import time
from collections import Counter

import pytest

from kvtool.errors import KvtoolError
from tests.fuzz.__main__ import try_kind
from tests.fuzz.contract import BYTES, SECONDS, Refused, run_case
from tests.fuzz.fields import PlanFields, RecipeFields, RunFields
from tests.fuzz.kinds import KINDS

DEAR = (PlanFields, RecipeFields, RunFields)


@pytest.mark.parametrize("cases", [10, pytest.param(100, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.exhaustive) if kind in DEAR else kind for kind in KINDS],
    ids=[kind.name.replace(" ", "-") for kind in KINDS],
)
def test_inputs_end_in_success_or_one_line(kind, cases, tmp_path):
    outcomes = try_kind(kind, tmp_path, seed=0, cases=cases)
    faults = [outcome.told for outcome in outcomes if outcome.verdict == "fault"]
    assert not faults
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    assert verdicts["refused"] >= cases // 10, "too little is damaged"
    if kind.name != "cache files, damaged":
        assert verdicts["success"] >= cases * 2 // 5, "too little goes through"


def refuse(message):
    raise KvtoolError(message)


def end_with(text):
    raise Refused(text)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("case", "verdict", "told"),
    [
        (lambda: None, "success", ""),
        (lambda: refuse("too large"), "refused", "too large"),
        (lambda: refuse(""), "fault", "an empty message"),
        (lambda: end_with("x\n" * 90), "fault", "90 lines"),
        (lambda: end_with("x" * 9000), "fault", "up to 9000"),
        (lambda: end_with("\ud800"), "fault", "cannot be printed"),
        (lambda: [][0], "fault", "IndexError"),
        (lambda: bytearray(BYTES + 2**26).count(1), "fault", "1088 MiB"),
    ],
)
def test_the_contract_tells_faults_from_refusals(case, verdict, told):
    outcome = run_case(case)
    assert outcome.verdict == verdict
    assert told in outcome.told


def compute():
    while True:
        pass


@pytest.mark.parametrize(
    ("clock", "case", "told"),
    [("SECONDS", compute, "more than 0.2 s"), ("WAIT", lambda: time.sleep(9), "waits 0.2 s")],
)
def test_a_case_that_takes_too_long_is_broken_off(clock, case, told, monkeypatch):
    monkeypatch.setattr(f"tests.fuzz.contract.{clock}", 0.2)
    outcome = run_case(case)
    assert (outcome.verdict, outcome.told) == ("fault", told)
    assert outcome.seconds < SECONDS
