"""The table in `kvtool/planning/README.md`: what runs hold now, and every line of it is true."""

import pytest

from kvtool.sizes import Budget
from tests.planning.bytes_table import CASES, CODED, PAGE, markdown, measure_all, table_of

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def rows():
    return measure_all()


def test_the_page_has_the_table_of_today(rows):
    assert table_of(PAGE.read_text()) == markdown(rows)


def test_every_policy_has_every_target(rows):
    assert [(row.policy, row.target) for row in rows] == CASES


def test_a_run_holds_what_is_planned_and_no_more_than_the_target(rows):
    for row in rows:
        size = Budget.parse(row.target).bytes
        if row.budget is None:
            assert row.planned > size, row
        else:
            assert row.held == row.planned <= size, row


def test_the_next_larger_budget_does_not_fit(rows):
    larger = [row for row in rows if row.above is not None]
    assert {row.policy for row in larger} >= {"h2o", "d2o", "sirllm", "adakv", "rocketkv", *CODED}
    for row in larger:
        assert row.above > Budget.parse(row.target).bytes, row
