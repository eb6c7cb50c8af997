"""Variants compared with each other: what is compared, what noise is, how many samples decide."""

import itertools
import json
import math
import random
from pathlib import Path

import pytest

from kvtool.documents.verdict import SampleScores
from kvtool.evaluation.verdict import between, differences
from tests.report.examples import result, variants

RECORDED = json.loads((Path(__file__).parent / "recorded_random.json").read_text())
ANSWERS = [[float(letter) for letter in row] for row in RECORDED["right"]]
PAIRS = random.Random(0).sample(list(itertools.combinations(range(len(ANSWERS)), 2)), 100)


def scored(name, sums, task="niah", **changes):
    """A result with the scores of its samples."""
    known = [each for each in sums if each is not None]
    value = sum(known) / len(known)
    [variant] = [each for each in VARIANTS if each.name == name]
    scores = SampleScores(sums=sums, weights=changes.pop("weights", None))
    return result(variant, task, value, None, scores=scores, **changes)


VARIANTS = variants(["h2o", "h2o+caote", "h2o+caote+int8", "tova", "snapkv"], [64, 128])


def pairs(results):
    return {(each.variant, each.against, each.because) for each in differences(results, VARIANTS)}


def test_an_variant_is_held_against_its_base_or_else_the_best_of_its_budget():
    found = [
        scored("full", [1.0] * 4),
        scored("h2o@64", [1.0, 0.0, 0.0, 0.0]),
        scored("h2o+caote@64", [1.0, 1.0, 0.0, 0.0]),
        scored("h2o+caote+int8@64", [1.0, 0.0, 0.0, 0.0]),
        scored("tova@64", [1.0, 1.0, 1.0, 0.0]),
        scored("snapkv@128", [1.0, 0.0, 0.0, 0.0]),
        scored("tova@128", [0.0, 0.0, 0.0, 0.0]),
    ]
    assert pairs(found) == {
        ("h2o@64", "tova@64", "best"),
        ("h2o+caote@64", "h2o@64", "base"),
        ("h2o+caote+int8@64", "h2o+caote@64", "base"),
        ("tova@128", "snapkv@128", "best"),
    }


def test_no_two_variants_are_compared_twice():
    found = [scored("h2o@64", [1.0, 0.0]), scored("h2o+caote@64", [1.0, 1.0])]
    assert pairs(found) == {("h2o+caote@64", "h2o@64", "base")}


def test_the_best_is_the_least_where_less_is_better():
    found = [
        scored(f"{policy}@64", sums, "ppl", lower_is_better=True)
        for policy, sums in (("h2o", [3.0, 4.0]), ("tova", [9.0, 9.0]))
    ]
    [only] = differences(found, VARIANTS)
    assert (only.variant, only.against, only.difference) == ("tova@64", "h2o@64", 5.5)


def test_only_samples_that_both_have_count():
    ours = scored("h2o@64", [1.0, None, 1.0, 0.0])
    theirs = scored("tova@64", [0.0, 1.0, None, 0.0])
    found = between(ours, theirs)
    assert (found.n, found.difference, found.because) == (2, 0.5, "asked")
    assert between(scored("h2o@64", [1.0, None]), scored("tova@64", [None, 1.0])) is None
    assert between(ours.model_copy(update={"scores": None}), theirs) is None


def test_weights_and_links_are_those_of_the_scores():
    """Mean NLLs (2 + 6) / (1 + 3) and (1 + 3) / (1 + 3): e^2 less e."""
    ours, theirs = (
        scored("h2o@64", [1.0, 1.0]).model_copy(
            update={"scores": SampleScores(sums=sums, weights=[1.0, 3.0], link="exp")}
        )
        for sums in ([2.0, 6.0], [1.0, 3.0])
    )
    assert between(ours, theirs).difference == pytest.approx(math.e**2 - math.e)


def test_what_would_decide_is_how_many_show_it_in_four_of_five_runs():
    """A difference of 0.1, standard deviation of a sample 0.3: (2.8 * 0.3 / 0.1)^2 = 71."""
    sums = [1.0] * 2 + [0.0] * 18 + [0.0]
    ours, theirs = scored("h2o@64", sums), scored("tova@64", [0.0] * 20 + [1.0])
    found = between(ours, theirs)
    assert found.low <= 0 <= found.high
    assert found.standing == "within the noise"
    spread = math.sqrt(
        sum((a - b - 1 / 21) ** 2 for a, b in zip(sums, [0.0] * 20 + [1.0], strict=True)) / 21
    )
    assert found.deciding == pytest.approx((2.8 * spread * 21) ** 2, rel=0.1)
    sure = between(scored("h2o@64", [1.0] * 15 + [0.0] * 6), theirs)
    assert (sure.standing, sure.deciding) == ("better", None)
    equal = between(ours, ours)
    assert (equal.standing, equal.deciding, equal.low) == ("within the noise", None, 0.0)
    few = between(scored("h2o@64", [1.0]), scored("tova@64", [0.0]))
    assert (few.standing, few.low, few.deciding) == ("no interval", None, None)


def recorded(index, sums=None):
    return scored("h2o@64" if index == 0 else "tova@64", ANSWERS[index] if sums is None else sums)


def compare(ours, theirs):
    return between(scored("h2o@64", ours), scored("tova@64", theirs)).standing


def test_equal_truths_are_within_the_noise_in_ninety_of_a_hundred_pairs():
    """Two seeds of `random` on 200 recorded samples of niah."""
    assert {len(row) for row in ANSWERS} == {200}
    noise = sum(compare(ANSWERS[a], ANSWERS[b]) == "within the noise" for a, b in PAIRS)
    assert noise >= 90


def test_a_difference_of_three_standard_errors_is_found_in_eighty_of_a_hundred_pairs():
    """Wrong samples of one of the two, drawn at random, are made right."""
    found = sum(compare(planted(a, b), ANSWERS[b]) == "better" for a, b in PAIRS)
    assert found >= 80


def planted(a, b):
    """Answers of seed `a` with as many more right ones as put the truth three errors above."""
    apart = [x - y for x, y in zip(ANSWERS[a], ANSWERS[b], strict=True)]
    mean, n = sum(apart) / len(apart), len(apart)
    error = math.sqrt(sum((x - mean) ** 2 for x in apart) / (n - 1) / n)
    answers = list(ANSWERS[a])
    wrong = [i for i, answer in enumerate(answers) if answer == 0]
    for i in random.Random(1000 * a + b).sample(wrong, round(3 * error * n)):
        answers[i] = 1.0
    return answers
