import random
from fractions import Fraction

from kvtool.documents.results import VariantEntry
from kvtool.report.variants import families, variants_in_order
from kvtool.sizes import budget_size
from tests.report.examples import document, variants


def named(*entries):
    return document((), {}).model_copy(
        update={
            "variants": [
                VariantEntry(
                    name=f"{policy}@{budget}{prefill}", policy=policy, budget=budget, prefill=p
                )
                for policy, budget, prefill in entries
                for p in [prefill.removeprefix(",") or "full"]
            ]
        }
    )


def test_variants_stand_by_policy_with_budgets_ascending_and_the_full_cache_first():
    entries = variants()
    expected = [variant.name for variant in entries]
    firsts = [variant for variant in entries if variant.budget in (None, 64)]
    others = [variant for variant in entries if variant.budget not in (None, 64)]
    random.Random(0).shuffle(others)
    shuffled = document(()).model_copy(update={"variants": [*firsts[1:], firsts[0], *others]})
    assert [variant.name for variant in variants_in_order(shuffled)] == expected


def test_budgets_are_ordered_by_size_not_by_spelling():
    found = families(
        named(("h2o", "20%", ""), ("h2o", "5%", ""), ("h2o", 1024, ""), ("h2o", 64, ""))
    )
    assert [variant.budget for variant in found[0].variants] == ["5%", "20%", 64, 1024]


def test_a_budget_has_a_unit_and_an_exact_size():
    assert budget_size(64) == ("tokens", Fraction(64))
    assert budget_size("4K") == ("tokens", Fraction(4096))
    assert budget_size("12.5%") == ("ratio", Fraction(1, 8))
    assert budget_size("2KiB") == ("bytes", Fraction(2048))


def test_variants_that_differ_in_the_prefill_are_lines_of_their_own():
    found = families(named(("h2o", 64, ""), ("h2o", 64, ",block:128"), ("h2o", 128, "")))
    assert [(f.label, len(f.variants)) for f in found] == [
        ("h2o, prefill full", 2),
        ("h2o, prefill block:128", 1),
    ]
