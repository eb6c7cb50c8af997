"""The best variant of a run for a given memory, over results that were made up."""

from dataclasses import replace

import pytest

from kvtool.documents.plan import PlanDocument, Target
from kvtool.documents.results import VariantEntry
from kvtool.documents.verdict import Paired
from kvtool.errors import UsageError
from kvtool.evaluation.verdict import make_verdict
from kvtool.planning.recommend import Place, against_full, recommend
from kvtool.sizes import Budget, bytes_in_words
from tests.planning.documents import F, profile, shape
from tests.report.examples import cost, document, result

PROMPT = 640  # tokens of the measured prompts, of which 128 are a fifth
CONTEXT, NEW = 32768, 128
SLOT = 256 + 2 * 4  # bytes of a token and its positions in one of the 4 layers
FULL = VariantEntry(name="full", policy="full", budget=None, prefill="full")


def arm(policy, budget=128, **more):
    return VariantEntry(
        name=f"{policy}@{budget}", policy=policy, budget=budget, prefill="full", **more
    )


def measured(gains, task="niah", full=0.8, low=-0.02, **changes):
    """Results of one task: the difference to the full cache by variant."""
    found = [result(FULL, task, full, full, **changes)]
    for entry, gain in gains.items():
        pair = Paired(n=20, full=full, difference=gain, low=gain + low, high=gain + 0.1, speed=None)
        costs = cost(arm("h2o"), prompt=PROMPT)
        fields = {"paired": pair, "cost": costs, **changes}
        one = result(FULL, task, full + gain, full, **fields)
        found.append(one.model_copy(update={"variant": entry.name}))
    return found


def run_of(results, arms):
    arms = [FULL, *arms]
    verdict = make_verdict(results, arms, 5)
    return document().model_copy(update={"variants": arms, "results": results, "verdict": verdict})


def place(size, profiled=None, **changes):
    target = Target(**{"bytes": size, "context": CONTEXT, "max_new_tokens": NEW} | changes)
    return Place(shape(), target, profiled, shape().layer_shapes())


def choose(gains, size, **more):
    return recommend(run_of(measured(gains), list(gains)), place(size, **more))


def streaming_bytes(tokens):
    """One slot more than the budget takes in the new token."""
    return 4 * (tokens + 1) * SLOT


MEASURED = {arm("streaming", 64): -0.1, arm("streaming", 128): -0.01, arm("streaming", 256): 0.0}
FIFTH = (CONTEXT - NEW) // 5
FULL_BYTES = 4 * CONTEXT * SLOT


def test_a_budget_is_a_share_of_the_prompt():
    """128 of 640 tokens are a fifth of any prompt; a byte less, and only a tenth fits."""
    found = choose(MEASURED, streaming_bytes(FIFTH))
    assert (found.evidence.variant.name, float(found.evidence.share)) == ("streaming@128", 0.2)
    assert found.planned.document.layers.tokens == [FIFTH] * 4
    assert found.too_large == ["streaming@256"]
    less = choose(MEASURED, streaming_bytes(FIFTH) - 1)
    assert less.evidence.variant.name == "streaming@64"
    assert less.too_large == ["streaming@128", "streaming@256"]


def test_the_plan_takes_all_of_the_memory_and_no_more():
    size = streaming_bytes(FIFTH) + 1000 * 4 * SLOT
    plan = choose(MEASURED, size).planned.document
    assert plan.layers.tokens == [FIFTH + 1000] * 4
    assert plan.planned_bytes == size
    assert plan.target == Target(bytes=size, context=CONTEXT, max_new_tokens=NEW)
    assert (plan.policy, plan.layers.allocator) == ("streaming", "uniform")


def test_the_best_score_wins_and_of_equals_the_smallest_share():
    gains = {arm("h2o", 256): 0.01, arm("tova", 128): 0.02, arm("roco", 64): 0.02}
    assert choose(gains, FULL_BYTES // 2).evidence.variant.name == "roco@64"
    gains[arm("streaming", 256)] = 0.03
    assert choose(gains, FULL_BYTES // 2).evidence.variant.name == "streaming@256"


@pytest.mark.parametrize(
    ("gain", "key_biases", "here", "chosen"),
    [
        (0.0, False, True, "full+int4"),  # of equals, the first
        (0.0, True, True, "full+int8"),
        (0.01, True, True, "full+int4"),
        (0.01, True, False, "full+int8"),
        (0.01, False, False, "full+int4"),
    ],
)
def test_keys_in_4_bits_need_evidence_where_keys_have_biases(gain, key_biases, here, chosen):
    gains = {arm("full+int4", None): gain, arm("full+int8", None): 0.0}
    results = run_of(measured(gains), list(gains))
    where = replace(place(FULL_BYTES * 9 // 10), key_biases=key_biases)
    model = where.model.model_copy(update={"config_hash": results.model.config_hash})
    where = replace(where, model=model) if here else where
    assert str(recommend(results, where).evidence.policy) == chosen


def test_scores_are_means_over_tasks_in_percent_of_the_full_cache():
    """h2o loses 10 % on one task, tova 4 % on each; in the tasks' own scales h2o looks better."""
    h2o, tova = arm("h2o"), arm("tova")
    both = [
        *measured({h2o: -0.08, tova: -0.032}),
        *measured({h2o: 0.0, tova: 4.0}, "ppl", 100.0, lower_is_better=True, best=None),
    ]
    found = recommend(run_of(both, [h2o, tova]), place(FULL_BYTES // 2))
    assert found.evidence.variant == tova
    assert [round(against_full(each)[0], 9) for each in found.evidence.tasks] == [-4, -4]


def test_the_full_cache_is_run_where_it_fits_unless_something_is_better_beyond_the_noise():
    found = choose({arm("h2o"): 0.01}, FULL_BYTES)
    assert found.evidence.variant == FULL
    plan = found.planned.document
    assert (plan.policy, plan.layers.tokens) == ("full", [CONTEXT - NEW] * 4)
    assert plan.planned_bytes == FULL_BYTES
    assert PlanDocument.model_validate(plan.to_data()) == plan
    assert choose({arm("h2o"): 0.01}, FULL_BYTES - 1).evidence.variant.name == "h2o@128"
    assert choose({arm("h2o"): 0.03}, FULL_BYTES).evidence.variant.name == "h2o@128"


@pytest.mark.parametrize(
    ("budget", "share"), [("20%", 0.2), ("12.5%", 0.125), ("1MiB", 128 / 640), (1280, 1)]
)
def test_budgets_of_every_kind_are_shares(budget, share):
    """The bytes kept 128 of 640 tokens, as the run counted; more than the prompt is all of it."""
    gains = {arm("h2o", budget): 0.1}
    run = run_of(measured(gains), list(gains))
    assert recommend(run, place(2 * FULL_BYTES)).evidence.share == pytest.approx(share)


def test_bytes_are_no_share_where_the_tokens_that_they_kept_were_not_counted():
    gains = {arm("h2o", "1MiB"): 0.1, arm("tova", "1MiB"): 0.0}
    full, uncounted, counted = measured(gains)
    costs = uncounted.cost.model_copy(update={"kept_tokens": 0})
    results = [full, uncounted.model_copy(update={"cost": costs}), counted]
    found = recommend(run_of(results, list(gains)), place(FULL_BYTES // 2))
    assert found.evidence.variant.name == "tova@1MiB"
    assert found.left_out == ["h2o@1MiB: the tokens that its bytes kept were not counted"]


def test_a_reader_reads_the_share_and_stores_everything():
    found = choose({arm("quest"): 0.1}, 2 * FULL_BYTES)
    plan = found.planned.document
    assert plan.layers.tokens == [FIFTH] * 4
    assert plan.planned_bytes > FULL_BYTES
    assert (
        choose({arm("quest"): 0.1, arm("h2o"): 0.0}, FULL_BYTES - 1).evidence.variant.name
        == "h2o@128"
    )


def test_rocketkv_is_planned_for_its_bytes():
    size = int(0.95 * FULL_BYTES)
    plan = choose({arm("rocketkv"): 0.1}, size).planned.document
    assert 0.99 * size < plan.planned_bytes <= size
    assert plan.rocketkv.token_budget > FIFTH


def test_a_policy_that_splits_over_layers_keeps_its_split():
    pyramid = choose({arm("pyramidkv"): 0.1}, FULL_BYTES // 2).planned.document
    assert pyramid.layers.allocator == "pyramid"
    assert pyramid.layers.tokens[0] > pyramid.layers.tokens[-1]
    gains = {arm("h2o+d2o-alloc"): 0.1, arm("h2o"): 0.0}
    without = choose(gains, FULL_BYTES // 2)
    assert without.evidence.variant.name == "h2o@128"
    assert "h2o+d2o-alloc@128: allocator `d2o` needs a profile" in without.left_out[0]
    planned = choose(gains, FULL_BYTES // 2, profiled=profile(f_variance=F)).planned.document
    assert (planned.policy, planned.layers.allocator) == ("h2o+d2o-alloc", "d2o")


@pytest.mark.parametrize(
    ("policy", "more", "why"),
    [
        ("h2o", {"planned": True}, "it was measured by a plan, which results do not hold"),
        ("pyramidinfer", {}, "it splits its budget by a schedule of its own, which no plan has"),
        ("somebody.elses:Score()", {}, "somebody"),
    ],
)
def test_what_cannot_be_planned_is_left_out_and_says_why(policy, more, why):
    found = choose({arm(policy, **more): 0.1, arm("streaming"): 0.0}, FULL_BYTES // 2)
    assert found.evidence.variant.name == "streaming@128"
    assert len(found.left_out) == 1
    assert why in found.left_out[0]


def test_what_failed_or_was_not_compared_is_left_out():
    h2o, roco, tova = arm("h2o"), arm("roco"), arm("tova")
    results = measured({h2o: 0.1, roco: 0.1, tova: 0.0})
    results[1] = results[1].model_copy(update={"failed": 2, "n": 18})
    results[2] = results[2].model_copy(update={"paired": None})
    found = recommend(run_of(results, [h2o, roco, tova]), place(FULL_BYTES // 2))
    assert found.evidence.variant == tova
    assert found.left_out == [
        "h2o@128: 2 of 20 samples failed",
        "roco@128: its score is no mean over samples",
    ]


def test_a_full_cache_that_is_quantised_is_a_variant_of_its_own():
    """Its heads take 34 bytes of 64 a vector; beside them are positions as ever, and 3 * 32."""
    coded = VariantEntry(name="full+int8", policy="full+int8", budget=None, prefill="full")
    gains = {coded: -0.001, arm("h2o"): -0.01}
    quantised = 4 * (CONTEXT * (2 * 2 * 34 + 2 * 4) + 2 * 3 * 32)
    found = choose(gains, quantised)
    assert (found.evidence.variant, found.evidence.share) == (coded, 1)
    plan = found.planned.document
    assert (plan.policy, plan.layers.tokens) == ("full+int8", [CONTEXT - NEW] * 4)
    assert plan.target == Target(bytes=quantised, context=CONTEXT, max_new_tokens=NEW)
    assert plan.planned_bytes == quantised
    assert PlanDocument.model_validate(plan.to_data()) == plan
    less = choose(gains, quantised - 1)
    assert (less.evidence.variant.name, less.too_large) == ("h2o@128", ["full+int8"])
    assert choose(gains, FULL_BYTES).evidence.variant == FULL


def test_a_codec_makes_room_for_more_tokens():
    plain, coded = (choose({arm(name): 0.0}, FULL_BYTES // 2) for name in ("h2o", "h2o+int8"))
    held = [found.planned.document.planned_bytes for found in (plain, coded)]
    assert all(0.999 * FULL_BYTES // 2 < size <= FULL_BYTES // 2 for size in held)
    kept = [found.planned.document.layers.tokens[0] for found in (plain, coded)]
    assert kept[1] / kept[0] == pytest.approx((256 + 2 * 8) / (2 * 2 * 34 + 2 * 8), abs=1e-3)


def test_nothing_fits_says_what_would():
    with pytest.raises(UsageError) as refused:
        choose(MEASURED, 1000)
    tenth = streaming_bytes((CONTEXT - NEW) // 10)
    said = f"`streaming@64` holds {bytes_in_words(tenth)}"
    assert f"fits into 1000 B at a context of 32768: {said}" in str(refused.value)
    size = Budget.parse(refused.value.hint.removeprefix("--bytes ")).bytes
    assert tenth <= size < tenth + 2**20 / 10
    assert choose(MEASURED, tenth).evidence.variant.name == "streaming@64"


def test_results_that_tell_nothing_are_refused():
    run = run_of(measured(MEASURED), list(MEASURED))
    old = run.model_copy(update={"verdict": None})
    with pytest.raises(UsageError, match="hold no verdict"):
        recommend(old, place(FULL_BYTES))
    with pytest.raises(UsageError, match="no measured policy beside the full cache"):
        recommend(run_of(measured({}), []), place(FULL_BYTES))
    alone = run_of(measured(MEASURED)[1:], list(MEASURED))
    with pytest.raises(UsageError, match="do not tell policies apart: it needs the full cache"):
        recommend(alone, place(FULL_BYTES))
