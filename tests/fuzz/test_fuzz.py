"""A few inputs of every kind keep the contract; `python -m tests.fuzz` tries many more."""

from collections import Counter

import pytest

from tests.fuzz.__main__ import try_kind
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
        assert verdicts["success"] >= cases // 2, "too little goes through"
