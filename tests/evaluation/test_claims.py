"""A claim against a run: which comparisons count, where their intervals lie."""

import pytest

from kvtool.documents.claim import Claim, check_claim
from kvtool.documents.verdict import SampleScores
from kvtool.errors import UsageError
from kvtool.evaluation.claims import judge_claim
from kvtool.report.words import claim_in_words, claim_line, claim_table
from tests.report.examples import document, result, variants

POLICIES = ["h2o", "h2o+caote", "tova"]
VARIANTS = variants(POLICIES, [64, 128])
GOOD, BAD, MIXED = [1.0] * 30, [0.0] * 30, [1.0, 0.0] * 15


def claim(*pairs, **changes):
    return Claim(
        says="more is more", pairs=[{"variant": a, "than": b, **changes} for a, b in pairs]
    )


def run(answers, task="niah", **changes):
    """Results by policy: the scores of samples at 64 and at 128 tokens."""
    found = []
    for variant in VARIANTS:
        if variant.policy in answers and variant.budget is not None:
            sums = answers[variant.policy][[64, 128].index(int(variant.budget))]
            known = [each for each in sums if each is not None]
            scores = SampleScores(sums=sums)
            found.append(
                result(variant, task, sum(known) / len(known), None, scores=scores, **changes)
            )
    return document(("niah",), dict.fromkeys(POLICIES, 1), (64, 128)).model_copy(
        update={"variants": VARIANTS, "results": found}
    )


def judged(answers, *pairs, task="niah", fields=None, **changes):
    return judge_claim(claim(*pairs, **changes), run(answers, task, **(fields or {})))


def test_all_budgets_of_a_pair_give_one_interval_over_samples():
    """Of 30 samples each is worth 1 and 0.5 at the two budgets, against 0 and 0.5: 0.5 above."""
    answers = {"h2o": (BAD, MIXED), "h2o+caote": (GOOD, MIXED)}
    found = judged(answers, ("h2o+caote", "h2o"))
    [row] = found.rows
    assert (row.n, row.difference, row.budgets, row.than_value) == (30, 0.5, ["64", "128"], 0.25)
    assert (row.low, row.high) == pytest.approx((0.5, 0.5))
    assert found.verdict == "holds"
    assert judged(answers, ("h2o", "h2o+caote")).verdict == "fails"


def test_only_the_budgets_that_are_named_count():
    answers = {"h2o": (BAD, GOOD), "h2o+caote": (GOOD, BAD)}
    for budget, verdict in ((64, "holds"), (128, "fails")):
        found = judged(answers, ("h2o+caote", "h2o"), budgets=[budget])
        assert (found.verdict, found.rows[0].budgets) == (verdict, [str(budget)])
    assert judged(answers, ("h2o+caote", "h2o")).verdict == "undecided"


def test_a_gain_may_be_said_to_be_larger_at_some_budgets_than_at_others():
    """Of 30 samples CAOTE gains 1 each at 64 tokens, and 0.5 on average at 128."""
    answers = {"h2o": (BAD, BAD), "h2o+caote": (GOOD, MIXED)}
    pair = ("h2o+caote", "h2o")
    found = judged(answers, pair, budgets=[64], than_at=[128])
    [row] = found.rows
    assert (row.difference, row.than_value, row.n, found.verdict) == (0.5, 0.5, 30, "holds")
    direct = {"h2o": (MIXED, BAD), "h2o+caote": (GOOD, BAD)}  # 1 - MIXED at 64 itself
    [plain] = judged(direct, pair, budgets=[64]).rows
    assert (row.low, row.high) == pytest.approx((plain.low, plain.high))
    [shown] = claim_table(found).rows
    assert [cell.text for cell in shown.cells[2:]] == [
        *("64 more than at 128", "+0.500", f"[+{row.low:.3f}, +{row.high:.3f}]"),
        *("30", "holds"),
    ]
    assert judged(answers, pair, budgets=[128], than_at=[64]).verdict == "fails"
    assert judged(answers, ("h2o", "h2o+caote"), budgets=[64], than_at=[128]).verdict == "fails"
    less = judged(answers, pair, budgets=[64], than_at=[128], fields={"lower_is_better": True})
    assert less.verdict == "fails"
    same = {"h2o": (BAD, BAD), "h2o+caote": (MIXED, MIXED)}
    assert judged(same, pair, budgets=[64], than_at=[128]).verdict == "undecided"


def test_a_gain_is_compared_between_budgets_of_the_run():
    for more in [
        {"than_at": [128]},
        {"than_at": [128], "budgets": [64, 128]},
        {"than_at": [128], "budgets": [64], "margin": 5.0},
        {"than_at": [256], "budgets": [64]},
    ]:
        wanted = claim(("h2o+caote", "h2o"), **more)
        with pytest.raises(UsageError, match=r"claim\.pairs\.0\.than_at: "):
            check_claim(wanted, POLICIES, ["64", "128"])


def test_some_of_each_is_in_part_and_noise_is_undecided():
    answers = {"h2o": (MIXED, MIXED), "h2o+caote": (GOOD, GOOD), "tova": (BAD, BAD)}
    up, down = ("h2o+caote", "h2o"), ("tova", "h2o")
    assert judged(answers, up, down).verdict == "holds in part"
    noise = {"h2o": (MIXED, MIXED), "tova": ([*MIXED[1:], 1.0], MIXED)}
    found = judged(noise, down)
    assert (found.verdict, found.rows[0].verdict) == ("undecided", "undecided")
    assert "undecided at this n (undecided in 1 of 1; n=30)" in claim_in_words(found)


def test_less_is_more_where_less_is_better():
    answers = {"h2o": (GOOD, GOOD), "h2o+caote": (BAD, BAD)}
    fields = {"lower_is_better": True}
    assert judged(answers, ("h2o+caote", "h2o"), fields=fields).verdict == "holds"
    assert judged(answers, ("h2o", "h2o+caote"), fields=fields).verdict == "fails"


def test_a_margin_is_percent_of_the_other_score():
    """One of 30 wrong: 3.3 % below, surely no more than 20 %, surely more than nothing never."""
    answers = {"h2o": (GOOD, GOOD), "tova": ([0.0, *GOOD[1:]], [0.0, *GOOD[1:]])}
    assert judged(answers, ("tova", "h2o"), margin=20.0).verdict == "holds"
    assert judged(answers, ("tova", "h2o"), margin=5.0).verdict == "undecided"
    bad = {"h2o": (GOOD, GOOD), "tova": (BAD, BAD)}
    assert judged(bad, ("tova", "h2o"), margin=20.0).verdict == "fails"


def test_controls_do_not_count_but_are_told():
    answers = {"h2o": (MIXED, MIXED), "h2o+caote": (GOOD, GOOD), "tova": (MIXED, MIXED)}
    wanted = Claim(
        says="more is more",
        pairs=[
            {"variant": "h2o+caote", "than": "h2o"},
            {"variant": "h2o", "than": "tova", "control": True},
        ],
    )
    found = judge_claim(wanted, run(answers))
    assert found.verdict == "holds"
    assert claim_in_words(found) == "holds (holds in 1 of 1; n=30; 1 of 1 controls do not hold)"
    only = wanted.model_copy(update={"pairs": wanted.pairs[1:]})
    assert judge_claim(only, run(answers)) is None


def test_samples_that_one_budget_lacks_are_left_out():
    answers = {"h2o": ([None, *BAD[1:]], BAD), "h2o+caote": (GOOD, [*GOOD[:-1], None])}
    [row] = judged(answers, ("h2o+caote", "h2o")).rows
    assert (row.n, row.difference) == (28, 1.0)


@pytest.mark.parametrize("budgets", [[], [64, 128]])
def test_policies_without_a_budget_are_compared_once(budgets):
    known = variants(["full+int8", "h2o"], budgets)
    sums = {"full": GOOD, "full+int8": [0.0, *GOOD[1:]]}
    found = [
        result(variant, "niah", 1.0, None, scores=SampleScores(sums=sums[variant.policy]))
        for variant in known
        if variant.policy in sums
    ]
    told = run({}).model_copy(update={"variants": known, "results": found})
    wanted = claim(("full+int8", "full"), margin=20.0)
    [row] = judge_claim(wanted, told).rows
    assert (row.n, row.budgets, row.verdict) == (30, [], "holds")
    assert row.difference == pytest.approx(-1 / 30)
    [shown] = claim_table(judge_claim(wanted, told)).rows
    assert shown.cells[2].text == ""


def test_a_run_without_either_policy_says_nothing():
    assert judged({"h2o": (GOOD, GOOD)}, ("tova", "h2o")) is None


def test_claims_about_what_is_not_compared_are_refused():
    for pair, said in [
        ({"variant": "roco", "than": "h2o"}, "claim.pairs.0.variant: `roco` is none of h2o"),
        ({"variant": "h2o", "than": "roco"}, "claim.pairs.0.than: `roco` is none of h2o"),
        ({"variant": "h2o", "than": "tova", "budgets": [96]}, "`96` is none of 64, 128"),
    ]:
        with pytest.raises(UsageError, match=said):
            check_claim(Claim(says="x", pairs=[pair]), POLICIES, ["64", "128"])


def test_words_and_table_tell_every_comparison():
    answers = {"h2o": (BAD, BAD), "h2o+caote": (GOOD, GOOD)}
    told = run(answers)
    wanted = claim(("h2o+caote", "h2o"))
    told = told.model_copy(update={"claim": wanted, "claim_verdict": judge_claim(wanted, told)})
    assert claim_line(told) == "more is more: holds (holds in 1 of 1; n=30)"
    [row] = claim_table(told.claim_verdict).rows
    assert [cell.text for cell in row.cells] == [
        *("h2o", "niah", "64, 128", "+1.000", "[+1.000, +1.000]", "30", "holds"),
    ]
    assert claim_line(told.model_copy(update={"claim": None})) is None
