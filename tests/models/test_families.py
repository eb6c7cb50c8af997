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


def tried():
    """All families; of those that ask nothing special of kvtool, two thirds by hand only."""
    plain = [family for family in families() if f"| `{family}` | works |  |" in told()]
    by_hand = {*plain} - {*plain[::3]}
    kinds = ("falcon", "gemma3_text", "minicpm3", "falcon_h1")
    for family in [*kinds, *(each for each in families() if each not in kinds)]:
        marks = [] if family in kinds else [pytest.mark.exhaustive]
        yield pytest.param(family, marks=[pytest.mark.slow] if family in by_hand else marks)


@made_with
@pytest.mark.parametrize("family", list(tried()))
def test_a_family_is_what_the_table_says(family):
    """`python -m tests.models.families` prints the table anew."""
    assert line(judge(family)) in told()
