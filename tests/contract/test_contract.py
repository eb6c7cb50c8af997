"""Every policy of the table keeps the contract.

By default each base and each modifier goes once through the battery, and every pair of modifiers
through those checks that parts most likely break for one another; the rest, and the compiling of
each, is in the exhaustive tier.
"""

import pytest

from tests.contract.cases import Case, cases
from tests.contract.checks import CHECKS

OF_BASES = (
    "an_entry_of_padding_alone_leaves_the_others_as_they_are",
    "every_tensor_of_a_cache_is_in_its_report",
)
EXHAUSTIVE = (
    "compiled_steps_are_the_eager_ones",
    "so_it_does_where_the_prompt_comes_whole",
    "an_entry_may_begin_in_a_later_turn",
)
OF_PAIRS = (
    "rows_of_a_padded_batch_are_the_rows_alone",
    "a_saved_cache_goes_on_like_the_unbroken_one",
    "a_budget_that_fits_gives_the_full_caches_logits",
    "no_step_holds_more_than_the_budget",
    "the_bytes_held_are_the_bytes_asked_for",
)


def swept() -> list:
    """All cases and checks; those that are left to the exhaustive tier are marked."""
    return [
        pytest.param(case, name, id=f"{case}-{name}", marks=[] if tried else pytest.mark.exhaustive)
        for case in cases()
        for name in CHECKS
        for tried in [
            (case.kind == "base" and name in OF_BASES)
            or (case.kind in ("base", "modifier") and name not in (*OF_BASES, *EXHAUSTIVE))
            or (case.kind == "pair" and name in OF_PAIRS)
        ]
    ]


@pytest.mark.parametrize(("case", "name"), swept())
def test_contract(case: Case, name: str):
    CHECKS[name](case)
