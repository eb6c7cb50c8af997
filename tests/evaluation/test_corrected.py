"""Pairs that a user asks for: which variants they are, their p-values, Holm's correction."""

from __future__ import annotations

import random

import pytest

from kvtool.documents.results import VariantEntry
from kvtool.documents.verdict import SampleScores
from kvtool.errors import UsageError
from kvtool.evaluation import verdict
from kvtool.evaluation.pairs import asked_pairs, compare, corrected, holm
from kvtool.evaluation.verdict import between, difference
from tests.report.examples import document, result, variants

VARIANTS = [
    *variants(("h2o", "tova"), (64, 128)),
    VariantEntry(name="m:Mine@64", policy="m:Mine", budget=64, prefill="full", label="mine"),
]


def slow_holm(values):
    """From the procedure: go up from the smallest p, and stop at the first that is too large.

    The corrected p-value is the smallest level at which the hypothesis is rejected.
    """

    def rejected(level):
        found = set()
        for rank, place in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
            if values[place] * (len(values) - rank) > level:
                break
            found.add(place)
        return found

    levels = sorted({min(1.0, p * k) for p in values for k in range(1, len(values) + 1)} | {1.0})
    return [
        next((level for level in levels if place in rejected(level)), 1.0)
        for place in range(len(values))
    ]


def test_holm_equals_its_procedure():
    draw = random.Random(0)
    for count in (1, 2, 3, 7):
        for _ in range(20):
            values = [round(draw.random() ** 3, 3) for _ in range(count)]
            assert holm(values) == pytest.approx(slow_holm(values))


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


def test_the_p_value_is_that_of_the_interval():
    """Counted over the resamples; below 0.05 just where the 95 % interval leaves out 0."""
    draw = random.Random(1)
    outside = 0
    for shift in (0.0, 0.1, 0.2, 0.3, 0.5):
        ours = [(draw.gauss(shift, 0.5), 1.0) for _ in range(20)]
        theirs = [(draw.gauss(0, 0.5), 1.0) for _ in range(20)]
        found = difference(ours, theirs)
        means = verdict._resampled_means(ours, theirs)
        over = [a - b for a, b in zip(*means, strict=True)]
        tail = min(sum(x <= 0 for x in over), sum(x >= 0 for x in over))
        assert found.p == pytest.approx(min(1.0, 2 * (tail + 1) / (len(over) + 1)))
        if abs(found.p - 0.05) > 0.002:
            assert (found.p < 0.05) == (not found.low <= 0 <= found.high)
        outside += found.p < 0.05
    assert 0 < outside < 5


def test_no_difference_has_a_p_value_of_1():
    assert difference([(1.0, 1.0)] * 8, [(1.0, 1.0)] * 8).p == 1.0
    assert difference([(1.0, 1.0)] * 5, [(0.0, 1.0)] * 5).p is None


def test_pairs_are_policies_at_common_budgets_or_variants():
    for text, found in [
        ("h2o,tova", [("h2o@64", "tova@64"), ("h2o@128", "tova@128")]),
        ("H2O, full", [("h2o@64", "full"), ("h2o@128", "full")]),
        ("h2o@64,h2o@128", [("h2o@64", "h2o@128")]),
        ("mine,h2o", [("m:Mine@64", "h2o@64")]),
        ("mine@64,tova@128", [("m:Mine@64", "tova@128")]),
        ("m:Mine,tova", [("m:Mine@64", "tova@64")]),
    ]:
        assert [(a.name, b.name) for a, b in asked_pairs([text], VARIANTS)] == found
        assert len(asked_pairs([text, text], VARIANTS)) == len(found)


def test_what_is_no_pair_is_refused():
    for text, message in [
        ("h2o", "takes two policies or variants, got `h2o`"),
        ("h2o,", "takes two policies or variants"),
        ("h2o,snapkv", "names `snapkv`, and this run has full, h2o, tova, mine"),
        ("h2o,hto", "names `hto`"),
        ("h2o@64,h2o@64", "names no two variants of one budget"),
    ]:
        with pytest.raises(UsageError, match=message):
            asked_pairs([text], VARIANTS)


def test_all_that_is_asked_for_is_corrected_together():
    draw = random.Random(2)
    results = [
        result(
            variant, "niah", 0.5, 1.0, scores=SampleScores(sums=[draw.random() for _ in range(12)])
        )
        for variant in VARIANTS
    ]
    made = document().model_copy(update={"variants": VARIANTS, "results": results})
    found = compare(made, ["h2o,tova", "mine,h2o"])
    assert [(each.variant, each.against) for each in found] == [
        ("h2o@64", "tova@64"),
        ("h2o@128", "tova@128"),
        ("m:Mine@64", "h2o@64"),
    ]
    plain = [
        between(made.of(each.variant, "niah"), made.of(each.against, "niah")) for each in found
    ]
    assert [each.p_holm for each in found] == holm([each.p for each in plain])
    assert {each.comparisons for each in found} == {3}
    assert not any(each.asked for each in plain)
    alone = made.compare("mine", "h2o")
    assert [each.p_holm for each in alone] == [plain[2].p]


def test_a_corrected_difference_may_be_within_the_noise_although_its_interval_is_not():
    results = [
        result(
            VARIANTS[i],
            "niah",
            0.5,
            1.0,
            scores=SampleScores(sums=[i * 0.1 + j % 3 * 0.1 for j in range(9)]),
        )
        for i in (1, 2)
    ]
    found = between(*results[::-1])
    assert found.standing == "better"
    assert found.model_copy(update={"p_holm": 0.06}).standing == "within the noise"
    assert corrected([found.model_copy(update={"p": None})])[0].p_holm is None
