"""The table of families in the page of the models is what becomes of them when they are tried."""

import pytest
import transformers

from tests.models.families import HEAD, MADE_WITH, judge, line, told
from tests.models.tiny import families

made_with = pytest.mark.skipif(
    transformers.__version__ != MADE_WITH, reason=f"the table is of transformers {MADE_WITH}"
)


@made_with
def test_the_table_has_a_row_for_every_family_and_explains_every_refusal():
    head, rows = told()[:2], [row.split("|")[1:-1] for row in told()[2:]]
    assert head == list(HEAD)
    assert [row[0].strip(" `") for row in rows] == families()
    for _, verdict, why in rows:
        assert verdict.strip() in ("works", "refused", "not tried")
        assert verdict.strip() == "works" or len(why.split()) > 4


@made_with
@pytest.mark.few(4)
@pytest.mark.parametrize("family", families())
def test_a_family_is_what_the_table_says(family):
    """`python -m tests.models.families` prints the table anew."""
    assert line(judge(family)) in told()
