"""The guarantee by hand, and over resplits of a run that was made up."""

import math
import random

import pytest

from kvtool.documents.results import ProtocolEntry, SamplesDocument, TaskSamples
from kvtool.documents.settings import Protocol
from kvtool.documents.verdict import Paired, SampleScores
from kvtool.errors import UsageError
from kvtool.evaluation.guarantee import (
    chance_of,
    check_guarantee,
    largest_loss,
    needed_contexts,
    with_guarantee,
)
from kvtool.evaluation.run.runner import Job
from kvtool.evaluation.samples.sample import Sample
from kvtool.evaluation.tasks.fidelity import FidelityTask
from kvtool.evaluation.tasks.niah import Needle
from kvtool.evaluation.tasks.perplexity import Perplexity
from kvtool.evaluation.verdict import make_verdict
from kvtool.report.words import guarantee_lines
from tests.report.examples import document, result, variants

BUDGETS = (64, 128, 256, 512, 1024)
LOST = {64: 90, 128: 38, 256: 9, 512: 3, 1024: 0}  # of 200
X = 5


def p(lost, counted=True, n=200):
    return chance_of(lost, n, X / 100, counted=counted)


def test_the_chance_of_few_losses_is_that_of_a_binomial():
    assert [round(p(lost), 6) for lost in (0, 3, 9)] == [0.000035, 0.009048, 0.454710]
    exact = sum(math.comb(200, k) * 0.05**k * 0.95 ** (200 - k) for k in range(10))
    assert p(9) == pytest.approx(exact, rel=1e-12)
    assert p(200) == pytest.approx(1)


def test_losses_between_0_and_1_have_hoeffdings_and_bentkus_bound():
    assert [round(p(lost, counted=False), 6) for lost in (3, 9)] == [0.024596, 0.947070]
    assert p(0, counted=False) == pytest.approx(0.95**200)
    assert p(2.5, counted=False) > p(3), "it is no sharper than the count of the next whole loss"
    assert (p(10, counted=False), p(11.5, counted=False)) == (1, 1)


def test_the_largest_loss_that_fits_is_clopper_and_pearsons():
    alone = [round(largest_loss(lost, 200, 0.05, counted=True), 4) for lost in LOST.values()]
    assert alone == [0.5106, 0.2415, 0.0772, 0.0383, 0.0149]
    at_once = [round(largest_loss(lost, 200, 0.01, counted=True), 4) for lost in LOST.values()]
    assert at_once == [0.5347, 0.2630, 0.0916, 0.0493, 0.0228]
    none = [largest_loss(0, n, 0.05, counted=True) for n in (50, 100, 200, 500)]
    assert [f"{100 * each:.2g}" for each in none] == ["5.8", "3", "1.5", "0.6"]
    assert largest_loss(200, 200, 0.05, counted=True) == 1
    found = largest_loss(2.5, 200, 0.05, counted=False)
    assert chance_of(2.5, 200, found, counted=False) == pytest.approx(0.05)


def test_it_takes_59_149_or_299_samples_without_a_loss():
    for bound, n in ((0.05, 59), (0.02, 149), (0.01, 299)):
        assert needed_contexts(bound) == n
        assert chance_of(0, n, bound, counted=True) <= 0.05
        assert chance_of(0, n - 1, bound, counted=True) > 0.05


# ---- runs


def scores(lost, n=200, best=1.0):
    return [0.0] * lost + [best] * (n - lost)


def run_of(tasks, loss=X, contexts=None, **changes):
    """What a run measured: `tasks` have the scores of each variant, the full cache's among them."""
    found, entries = [], []
    for task, of_variant in tasks.items():
        n = len(of_variant["full"])
        means = {name: sum(sums) / len(sums) for name, sums in of_variant.items()}
        for name, sums in of_variant.items():
            gain = means[name] - means["full"]
            pair = Paired(n=n, full=means["full"], difference=gain, low=-1, high=1, speed=None)
            one = result(FULL, task, means[name], means["full"], n=n, **changes)
            more = {"variant": name, "paired": None if name == "full" else pair}
            found.append(one.model_copy(update=more | {"scores": SampleScores(sums=sums)}))
        samples = [(str(i), "") for i in range(n)]
        numbers = list(range(n)) if contexts is None else contexts
        about = {"version": 1, "settings": {}, "fingerprint": "", "samples": samples}
        entries.append(TaskSamples(task=task, contexts=numbers, **about))
    names = {name for of_variant in tasks.values() for name in of_variant}
    arms = [each for each in variants({"h2o": 0, "tova": 0}, BUDGETS) if each.name in names]
    protocol = ProtocolEntry(**vars(Protocol()))
    index = SamplesDocument(
        model={}, protocol=protocol, variants=arms, tasks=entries, guarantee=loss
    )
    return found, index


FULL = variants({}, ())[0]


def judged(tasks, loss=X, change=list, **more):
    found, index = run_of(tasks, loss, **more)
    found = change(found)
    return with_guarantee(make_verdict(found, index.variants, X), found, index)


def passed(verdict):
    return [each.variant for each in verdict.guarantee.chain if each.passed]


def one_policy(lost, policy="h2o", n=200, **more):
    own = {f"{policy}@{budget}": scores(each, n) for budget, each in lost.items()}
    return {"full": scores(0, n), **own, **more}


def test_the_walk_goes_down_to_the_first_budget_that_fails():
    verdict = judged({"niah": one_policy(LOST)})
    chain = verdict.guarantee.chain
    assert [each.variant for each in chain] == [f"h2o@{each}" for each in reversed(BUDGETS)]
    assert passed(verdict) == ["h2o@1024", "h2o@512"]
    assert [each.lost for each in chain] == [0, 3, 9, 38, 90]
    assert [round(each.p, 6) for each in chain[:3]] == [0.000035, 0.009048, 0.454710]
    bounds = [round(each.bound, 2) for each in chain]
    assert bounds == [2.28, 4.93, 9.16, 26.30, 53.47], "all five at once"
    averages = [200 / 201 * lost / 200 + 1 / 201 for lost in (9, 38)]
    assert averages[0] < 0.05 < averages[1], "a bound on the average would name 256"


def test_a_budget_below_one_that_fails_is_not_tested():
    assert passed(judged({"niah": one_policy(LOST | {256: 9, 128: 0})})) == ["h2o@1024", "h2o@512"]
    assert passed(judged({"niah": one_policy(LOST | {1024: 9})})) == []


def test_policies_share_the_5_percent():
    """4 of 200 pass a test at 5 % (p = .0264), and none at 2.5 %."""
    four = {512: 4, 1024: 0}
    alone = judged({"niah": one_policy(four)})
    assert (passed(alone), alone.guarantee.level) == (["h2o@1024", "h2o@512"], 0.05)
    both = judged({"niah": one_policy(four, **one_policy({512: 3}, "tova"))})
    assert (passed(both), both.guarantee.level) == (["h2o@1024", "tova@512"], 0.025)


def test_a_budget_passes_on_all_tasks_or_not_at_all():
    verdict = judged({"a": one_policy(LOST), "b": one_policy(LOST | {512: 8})})
    assert passed(verdict) == ["h2o@1024"]
    assert verdict.guarantee.chain[1].task == "b"


def test_a_gain_pays_for_no_loss():
    full = [0.0] * 20 + [1.0] * 180
    gains = {"full": full, "h2o@512": [1.0] * 20 + [0.0] * 20 + [1.0] * 160}
    found = judged({"niah": gains}).guarantee.chain[0]
    assert (found.lost, found.passed, found.counted) == (20, False, True)


def test_scores_between_wrong_and_right_are_shares_of_a_perfect_one():
    half = {"full": [100.0] * 200, "h2o@512": [50.0] * 6 + [100.0] * 194}
    found = judged({"ruler": half}, best=100.0).guarantee.chain[0]
    assert (found.lost, found.counted, found.passed) == (3, False, True)
    assert round(found.p, 6) == 0.024596


def test_questions_about_one_context_give_one_loss():
    contexts = [i // 4 for i in range(200)]
    answers = {"full": [1.0] * 200, "h2o@512": [0.0, 1.0, 0.0, 1.0] + [1.0] * 196}
    found = judged({"qa": answers}, contexts=contexts).guarantee.chain[0]
    assert (found.n, found.lost, found.counted, found.passed) == (50, 0.5, False, False)
    assert judged({"qa": answers}).guarantee.chain[0].passed


@pytest.mark.parametrize(
    ("update", "why"),
    [
        ({"failed": 1, "n": 199}, "1 of 200 samples failed"),
        ({"n": 199}, "1 of 200 samples are missing"),
        ({"paired": None}, "its score is no mean over samples"),
    ],
)
def test_what_was_not_measured_whole_has_no_guarantee(update, why):
    def change(found):
        return [found[0], found[1].model_copy(update=update)]

    found = judged({"niah": one_policy({512: 0})}, change=change).guarantee.chain[0]
    assert (found.passed, found.why) == (False, why)


def test_a_run_that_was_broken_off_has_no_guarantee():
    """Samples that neither has are missing, too: a run may not end when it looks well."""

    def change(found):
        return [each.model_copy(update={"n": 150}) for each in found]

    found = judged({"niah": one_policy({512: 0})}, change=change).guarantee.chain[0]
    assert (found.passed, found.why) == (False, "the run is not complete")


def test_none_where_none_was_asked_for_or_there_is_no_verdict():
    assert judged({"niah": one_policy(LOST)}, loss=None).guarantee is None
    assert judged({"niah": {"full": scores(200), "h2o@64": scores(200)}}).guarantee is None


# ---- does it hold


def resplits(whole, of=200, times=1000):
    """How often a rule's variant loses more than X % on the samples that it was not chosen by."""
    n, draw, wrong, lucky = len(whole["full"]), random.Random(0), 0, 0
    found, index = run_of({"niah": {name: sums[:of] for name, sums in whole.items()}})
    verdict = make_verdict(found, index.variants, X)
    for _ in range(times):
        chosen = draw.sample(range(n), of)
        rest = sorted(set(range(n)).difference(chosen))
        drawn = [
            each.model_copy(
                update={"scores": SampleScores(sums=[whole[each.variant][i] for i in chosen])}
            )
            for each in found
        ]
        after = {name: sum(1 - sums[i] for i in rest) / len(rest) for name, sums in whole.items()}
        chain = with_guarantee(verdict, drawn, index).guarantee.chain
        wrong += any(after[each.variant] > X / 100 for each in chain if each.passed)
        lucky += any(after[each.variant] > X / 100 for each in chain if each.lost / each.n <= 0.05)
    return wrong / times, lucky / times


NOISE = 3 * math.sqrt(0.05 * 0.95 / 1000)


@pytest.mark.parametrize("partly", [False, True])
def test_over_resplits_what_is_guaranteed_is_exceeded_in_at_most_5_percent(partly):
    """600 samples; budgets lose about 5 % or more, each on samples of its own.

    The smallest mean is a rule that fails by far, so that the run can tell rules apart.
    """
    draw = random.Random(1)
    counts = {1024: 12, 512: 28, 256: 31, 128: 33, 64: 34}
    whole = {"full": [1.0] * 600}
    for policy in ("h2o", "tova"):
        for budget, lost in counts.items():
            missed = set(draw.sample(range(600), 2 * lost if partly else lost))
            left = 0.5 if partly else 0.0
            whole[f"{policy}@{budget}"] = [left if i in missed else 1.0 for i in range(600)]
    wrong, lucky = resplits(whole)
    assert wrong <= 0.05 + NOISE
    assert lucky > 0.5


def test_at_the_bound_itself_a_test_is_wrong_in_at_most_5_percent_of_runs():
    """Fresh prompts, of which exactly X % are lost: where a test is most often wrong."""
    draw, wrong, runs, n = random.Random(2), 0, 4000, 181
    assert chance_of(4, n, 0.05, counted=True) < 0.05 < chance_of(4, n - 1, 0.05, counted=True)
    for _ in range(runs):
        lost = sum(draw.random() < X / 100 for _ in range(n))
        wrong += chance_of(lost, n, X / 100, counted=True) <= 0.05
    assert 0.04 < wrong / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)


# ---- refused before the run


def job(task, contexts):
    samples = [Sample(str(i), text) for i, text in enumerate(contexts)]
    return Job(task, samples, [""] * len(samples))


def refusal(loss, *jobs, policies=("h2o",), full=True):
    arms = variants(dict.fromkeys(policies, 0), (64, 128))[0 if full else 1 :]
    with pytest.raises(UsageError) as caught:
        check_guarantee(loss, jobs, arms)
    return str(caught.value)


def texts(n):
    return [f"text {i}" for i in range(n)]


NEEDLES = Needle(name="niah")


def test_too_few_contexts_are_refused_with_the_number_that_it_takes():
    for loss, n in ((5, 59), (2, 149), (1, 299)):
        check_guarantee(loss, [job(NEEDLES, texts(n))], variants({"h2o": 0}, (64, 128)))
        few = refusal(loss, job(NEEDLES, texts(n)), job(NEEDLES, texts(n - 1)))
        assert f"--guarantee {loss} takes {n} contexts of each task" in few
        assert f"niah has {n - 1}" in few
    assert "takes 72 contexts" in refusal(5, job(NEEDLES, texts(71)), policies=("h2o", "tova"))
    assert "niah has 50" in refusal(5, job(NEEDLES, texts(50) * 2))
    check_guarantee(5, [job(NEEDLES, [""] * 59)], variants({"h2o": 0}, (64,)))


@pytest.mark.parametrize(
    "task", [FidelityTask(name="fidelity"), Perplexity(name="ppl")], ids=["fidelity", "ppl"]
)
def test_scores_that_hold_no_right_answers_are_refused(task):
    assert f"--guarantee: {task.name} has no score" in refusal(5, job(task, texts(100)))


def test_nothing_to_compare_is_refused():
    assert "compares policies with the full cache" in refusal(5, policies=())
    assert "compares policies with the full cache" in refusal(5, full=False)


# ---- in words


def said(verdict, policies=("h2o", "tova")):
    arms = variants(dict.fromkeys(policies, 0), BUDGETS)
    return guarantee_lines(document().model_copy(update={"verdict": verdict, "variants": arms}))


def test_it_says_which_budget_has_it_and_why_the_next_one_has_not():
    verdict = judged({"niah": one_policy(LOST)})
    assert said(verdict)[:2] == [
        "guarantee: with 95 % confidence at most 5 % of prompts like these lose an answer that the "
        "full cache gives",
        "  h2o: h2o@512 (niah: 3 of 200); not h2o@256 (niah: 9 of 200, at most 9.16 %)",
    ]
    assert said(verdict)[-1] == (
        "  holds for prompts drawn as these were, and for budgets fixed before the run"
    )
    assert said(judged({"niah": one_policy(LOST)}, loss=None)) == []


def test_both_names_are_said_where_the_verdict_has_another():
    verdict = judged({"niah": one_policy(LOST)})
    for name, differs in (("h2o@256", True), ("h2o@512", False)):
        choices = [each.model_copy(update={"variant": name}) for each in verdict.choices]
        lines = said(verdict.model_copy(update={"choices": choices}))
        assert (f"  the verdict by bytes held differs: {name}" in lines) is differs


def test_none_says_how_many_samples_it_takes():
    lines = said(judged({"niah": one_policy({512: 1}, n=60)}))
    assert lines[1] == "  h2o: not h2o@512 (niah: 1 of 60, at most 7.66 %)"
    assert "  none passed; it takes 59 contexts if none is lost, else more" in lines
    assert not any("differs" in line for line in lines), "the verdict names none, too"


def test_partial_losses_are_said_as_a_mean():
    half = {"full": [100.0] * 200, "h2o@512": [50.0] * 6 + [100.0] * 194}
    lines = said(judged({"ruler": half}, best=100.0))
    assert lines[0].endswith(
        "at most 5 % of a perfect score is lost, in the mean over contexts like these"
    )
    assert "h2o@512 (ruler: 1.5 % over 200)" in lines[1]
