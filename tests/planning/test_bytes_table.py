"""The table in `planning/reference.md`: all plans are those of today, as are runs of a few."""

import pytest

import kvtool
from kvtool.models.load import load
from kvtool.sizes import Budget
from tests.models.bundled import shipped
from tests.planning.bytes_table import CASES, CODED, PAGE, line, measure, promise, table_of

LINES = table_of(PAGE.read_text()).splitlines()[2:]
RUNS = [  # policies that store, or find the next budget, in ways of their own
    ("h2o", "768KiB"),
    ("duoattention", "2MiB"),
    ("kvzip", "768KiB"),
    ("sirllm", "768KiB"),
    ("hsa", "6MiB"),
    ("rocketkv", "768KiB"),
    ("h2o+k8v4", "128KiB"),
    ("full+int4", "6MiB"),
]


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(load(str(shipped())).model)


@pytest.mark.exhaustive
def test_every_plan_of_the_page_is_that_of_today(model):
    assert len(LINES) == len(CASES)
    for found, case in zip(LINES, CASES, strict=True):
        said = line(promise(model, *case)).split(" | ")
        assert found.split(" | ")[:4] == said[:4]


def test_no_line_of_the_page_holds_more_than_its_target_and_the_next_budget_does():
    larger = set()
    for found, (policy, target) in zip(LINES, CASES, strict=True):
        size = Budget.parse(target).bytes
        budget, planned, held, above = found.strip("| ").split(" | ")[2:]
        if budget == "refused":
            assert int(planned.removeprefix("would take ")) > size, found
            continue
        assert int(held) == int(planned) <= size, found
        if above != "the whole prompt is stored":
            assert int(above) > size, found
            larger.add(policy)
    assert larger >= {"h2o", "d2o", "sirllm", "adakv", "rocketkv", *CODED}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", RUNS, ids=" ".join)
def test_a_run_holds_today_what_the_page_says(model, case):
    assert line(measure(model, *case)) in LINES
