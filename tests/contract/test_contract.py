"""Every policy of the table keeps the contract: its clauses, which `--check` asks too, and more.

By default each base goes once through most of the battery, each modifier and pair of modifiers
through those checks that it most likely breaks. The exhaustive tier has the rest, and a modifier on
a base with another kind of budget.
"""

import pytest

from kvtool.calls.policy_checks import CHECKS as CLAUSES
from tests.contract.cases import Case, cases
from tests.contract.checks import CHECKS

OF_PAIRS = ("an_entry_of_a_padded_batch_is_the_entry_alone",)  # by default
OF_MODIFIERS = (
    *OF_PAIRS,
    "a_saved_cache_goes_on_like_the_unbroken_one",
    "a_rollback_leaves_no_trace",
    "a_reordered_cache_is_saved_as_the_entries_that_were_taken",
    "a_text_that_fits_the_budget_is_left_alone",
    "the_budget_is_held",
)
EXHAUSTIVE = (
    "compiled_steps_are_the_eager_ones",
    "an_entry_of_padding_alone_where_the_prompt_comes_whole",
    "an_entry_may_begin_in_a_later_turn",
)
ONCE = (  # on bases alone, in either tier
    "it_runs_and_stays_finite",
    "one_block_is_the_whole_prompt",
    "blocks_of_one_token_decide_as_decoded_tokens",
    "a_budget_at_its_limit_is_refused_or_works",
    "heads_of_unequal_counts_are_stored_row_by_row",
)
OF_SCORES_FROM_OUTSIDE = "what_is_protected_is_reserved"
ALL = set(CHECKS) - {OF_SCORES_FROM_OUTSIDE}
DEFAULT = {"base": ALL - set(EXHAUSTIVE), "modifier": OF_MODIFIERS, "pair": OF_PAIRS}
SWEEP = {  # in the two tiers together
    "base": ALL,
    "modifier": ALL - set(ONCE),
    "pair": ALL - set(ONCE) - {"an_entry_of_padding_alone_where_the_prompt_comes_whole"},
    "again": (*OF_MODIFIERS, "a_plan_of_unequal_layers_is_obeyed_to_the_byte"),
}


def tier(case: Case, name: str) -> list | None:
    """Marks of a case under a check; None where it is not run."""
    if name not in SWEEP[case.kind]:
        return None
    return [] if name in DEFAULT.get(case.kind, ()) else [pytest.mark.exhaustive]


SWEPT = [
    pytest.param(case, name, id=f"{case}-{name}", marks=marks)
    for case in cases()
    for name in CHECKS
    if (marks := tier(case, name)) is not None
]


@pytest.mark.parametrize(("case", "name"), SWEPT)
def test_contract(case: Case, name: str):
    CHECKS[name](case)


def test_every_clause_of_the_product_is_swept():
    names = {each.replace(" ", "_") for each in CLAUSES} - {OF_SCORES_FROM_OUTSIDE}
    assert names < {param.values[1] for param in SWEPT}
    assert {*OF_MODIFIERS, *EXHAUSTIVE, *ONCE, OF_SCORES_FROM_OUTSIDE} <= set(CHECKS)
