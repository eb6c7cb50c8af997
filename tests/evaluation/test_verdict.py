"""The verdict by hand, over results that were made up."""

import pytest

from kvtool.documents.results import MetricEntry, ResultsDocument
from kvtool.documents.verdict import Interval, Paired
from kvtool.evaluation.verdict import make_verdict
from tests.report.examples import document, result, variants

VARIANTS = variants({"streaming": 0, "h2o": 0, "roco": 0}, (64, 128))
FULL, NAMES = VARIANTS[0], [variant.name for variant in VARIANTS[1:]]


def paired(difference, low, high, full=0.8, n=20, speed=None):
    return Paired(n=n, full=full, difference=difference, low=low, high=high, speed=speed)


def cost_of(variant, **changes):
    return result(variant, "niah", 0.5, 0.8).cost.model_copy(update=changes)


def results_of(pairs, task="niah", full=0.8, **changes):
    """The full cache, and every other variant with its pair, or with changed fields of a result."""
    found = [result(FULL, task, full, full, **changes)]
    for variant, given in zip(VARIANTS[1:], pairs, strict=True):
        own = given if isinstance(given, dict) else {"paired": given}
        pair = own.get("paired")
        value = full if pair is None else full + pair.difference
        one = result(variant, task, value, full, **changes)
        found.append(one.model_copy(update=own))
    return found


WITHIN = paired(-0.01, -0.039, 0.01)  # of 0.8: -1.25 %, -4.875 % to +1.25 %
EDGE = paired(-0.01, -0.04, 0.01)  # the lower end is at -5 %, not above
OUT = paired(-0.04, -0.08, 0.0)  # the difference itself is at -5 %


def standing_of(verdict):
    return {each.variant: each.standing for each in verdict.variants}


def test_the_lower_end_of_the_interval_decides():
    pairs = [OUT, EDGE, WITHIN, WITHIN, paired(0.1, 0.05, 0.2), paired(-0.2, -0.3, -0.1)]
    verdict = make_verdict(results_of(pairs), VARIANTS, 5)
    expected = ["outside", "undecided", "within", "within", "within", "outside"]
    assert standing_of(verdict) == dict(zip(NAMES, expected, strict=True))
    one = verdict.of("h2o@64")
    assert (one.task, one.n) == ("niah", 20)
    assert (one.difference, one.low, one.high) == pytest.approx((-1.25, -4.875, 1.25))
    wider = make_verdict(results_of(pairs), VARIANTS, 5.01)
    assert wider.of("streaming@128").standing == "within"
    assert wider.of("streaming@64").standing == "undecided"


def test_where_smaller_is_better_the_upper_end_decides():
    """A perplexity of 10: 10.3 with 10.1 to 10.49 is within 5 %, up to 10.51 is not."""
    pairs = [
        paired(0.3, 0.1, 0.49, 10.0),
        paired(0.3, 0.1, 0.51, 10.0),
        paired(0.6, 0.1, 0.9, 10.0),
        *[paired(-0.6, -0.9, -0.1, 10.0)] * 3,
    ]
    found = results_of(pairs, "ppl", 10.0, lower_is_better=True, best=None)
    verdict = make_verdict(found, VARIANTS, 5)
    expected = ["within", "undecided", "outside", "within", "within", "within"]
    assert standing_of(verdict) == dict(zip(NAMES, expected, strict=True))
    assert verdict.of("streaming@64").low == pytest.approx(-4.9)
    assert verdict.of("roco@128").difference == pytest.approx(6)


def test_the_cheapest_within_bounds_is_chosen_by_each_cost():
    costs = [  # held = buffers and state, read, seconds of 8 tokens
        (100, 10, 50, 1.0),
        (500, 20, 40, 0.3),
        (200, 900, 30, 0.1),
        (600, 10, 90, 0.9),
        (610, 5, 80, 2.0),
        (90, 10, 85, 0.8),
    ]
    pairs = [OUT, EDGE, WITHIN, WITHIN, WITHIN, WITHIN]
    speed = Interval(value=1.1, low=0.9, high=1.3)
    pairs[5] = WITHIN.model_copy(update={"speed": speed})
    found = results_of(pairs)
    for i, (buffers, state, read, seconds) in enumerate(costs):
        changed = {"allocated_bytes": buffers, "state_bytes": state, "traffic_bytes": read}
        changed |= {"decode_s": seconds, "decode_tokens_per_s": 8 / seconds}
        found[i + 1] = found[i + 1].model_copy(update={"cost": cost_of(VARIANTS[i + 1], **changed)})
    full = {"allocated_bytes": 1000, "state_bytes": 50, "traffic_bytes": 85, "decode_s": 0.85}
    full |= {"decode_tokens_per_s": 8 / 0.85}
    found[0] = found[0].model_copy(update={"cost": cost_of(FULL, **full)})
    by_bytes, by_traffic, by_time = make_verdict(found, VARIANTS, 5).choices
    assert (by_bytes.by, by_bytes.variant, by_bytes.cost, by_bytes.full) == (
        "bytes",
        "roco@128",
        100,
        1050,
    )
    assert by_bytes.undecided == []  # streaming@128 holds more
    assert (by_traffic.variant, by_traffic.cost) == ("h2o@64", 30)
    assert (by_time.variant, by_time.cost) == ("h2o@64", 0.1 / 8)
    without = [each for each in found if each.variant != "h2o@64"]
    by_bytes, by_traffic, by_time = make_verdict(without, VARIANTS, 5).choices
    assert (by_traffic.variant, by_traffic.undecided) == ("roco@64", ["streaming@128"])
    assert (by_time.variant, by_time.undecided) == ("roco@128", ["streaming@128"])
    assert by_time.speed == speed


def test_none_where_none_is_within_bounds_or_none_of_them_is_cheaper():
    verdict = make_verdict(results_of([OUT] * 6), VARIANTS, 5)
    assert [(each.variant, each.undecided) for each in verdict.choices] == [(None, [])] * 3
    undecided = make_verdict(results_of([OUT, EDGE, OUT, OUT, OUT, OUT]), VARIANTS, 5)
    assert undecided.choices[0].variant is None
    assert undecided.choices[0].undecided == ["streaming@128"]
    found = results_of([WITHIN] * 6)
    dear = [each.model_copy(update={"cost": cost_of(FULL)}) for each in found]
    verdict = make_verdict(dear, VARIANTS, 5)
    assert set(standing_of(verdict).values()) == {"within"}
    assert [each.variant for each in verdict.choices] == [None] * 3, "the full cache costs no more"


def test_a_variant_must_be_within_bounds_on_every_task():
    both = [*results_of([WITHIN] * 6), *results_of([WITHIN, EDGE, OUT, WITHIN, EDGE, WITHIN], "b")]
    verdict = make_verdict(both, VARIANTS, 5)
    expected = ["within", "undecided", "outside", "within", "undecided", "within"]
    assert standing_of(verdict) == dict(zip(NAMES, expected, strict=True))
    assert verdict.tasks == ["niah", "b"]
    assert (verdict.of("h2o@64").task, verdict.of("h2o@128").task) == ("b", "niah")


def test_costs_are_means_over_the_samples_of_all_tasks():
    both = [*results_of([WITHIN] * 6), *results_of([WITHIN] * 6, "b", n=60)]
    for i, each in enumerate(both):
        held = {"niah": 100.0, "b": 200.0}[each.task] + (1000 if each.variant == "full" else 0)
        cost = cost_of(FULL, allocated_bytes=held, state_bytes=0)
        both[i] = each.model_copy(update={"cost": cost})
    choice = make_verdict(both, VARIANTS, 5).choices[0]
    assert (choice.cost, choice.full) == ((20 * 100 + 60 * 200) / 80, (20 * 1100 + 60 * 1200) / 80)


def test_what_cannot_be_compared_is_undecided_and_says_why():
    for given, why in [
        ({"paired": WITHIN, "failed": 2, "n": 18}, "2 of 20 samples failed"),
        ({"paired": WITHIN, "n": 15}, "5 of 20 samples are missing"),
        ({"paired": None, "n": 0}, "no sample was measured"),
        ({"paired": None}, "its score is no mean over samples"),
        ({"paired": None, "value": None}, "its score is not finite"),
        (
            {"paired": WITHIN.model_copy(update={"full": 0.0})},
            "the full cache scores 0 on the 20 sam",
        ),
        ({"paired": paired(-0.01, None, None, n=5)}, "fewer than 6 samples"),
    ]:
        verdict = make_verdict(results_of([given, *[WITHIN] * 5]), VARIANTS, 5)
        assert verdict.variants[0].standing == "undecided"
        assert verdict.variants[0].why.startswith(why)
        assert verdict.choices[0].variant == "h2o@64", "which is the cheapest of the others"
        measured = given.get("n") != 0
        assert verdict.choices[0].undecided == (["streaming@64"] if measured else [])


def test_a_large_loss_of_few_samples_is_one_all_the_same():
    few = paired(-0.6, None, None, n=5)
    assert make_verdict(results_of([few] * 6), VARIANTS, 5).variants[0].standing == "outside"


def test_texts_fed_in_blocks_are_not_held_against_those_fed_token_by_token():
    def fed(chunk):
        values = {"ppl": 10.0, "chunk": chunk}
        return [MetricEntry(name=k, value=v, n=20, stderr=None) for k, v in values.items()]

    blocks, tokens = (
        {"paired": None, "metrics": fed(128.0)},
        {"paired": WITHIN, "metrics": fed(1.0)},
    )
    pairs = [blocks, *[tokens] * 5]
    verdict = make_verdict(results_of(pairs, "ppl", metrics=fed(1.0)), VARIANTS, 5)
    assert verdict.variants[0].standing == "undecided"
    assert verdict.variants[0].why == "the text was fed by 128 tokens, to the full cache by 1"
    assert verdict.variants[1].standing == "within"


def test_tasks_without_a_score_to_lose_are_left_out():
    """Seconds are no score, and of a score of 0 nothing can be lost."""
    lost = paired(-1.0, -1.0, -1.0)
    timed = results_of([lost] * 6, "speed", droppable=False)
    zero = results_of([lost] * 6, "hard", 0.0)
    verdict = make_verdict([*results_of([WITHIN] * 6), *timed, *zero], VARIANTS, 5)
    assert verdict.tasks == ["niah"]
    assert set(standing_of(verdict).values()) == {"within"}
    assert (
        make_verdict(timed, VARIANTS, 5).why
        == "no task has a score of which percent mean something"
    )
    assert make_verdict(zero, VARIANTS, 5).why == "the full cache scores 0"


def test_a_verdict_needs_the_full_cache_and_another():
    found = results_of([WITHIN] * 6)
    assert "--baseline" in make_verdict(found[1:], VARIANTS[1:], 5).why
    assert make_verdict(found[:1], VARIANTS[:1], 5).why == "no policy stands beside the full cache"
    assert make_verdict([], VARIANTS, 5) is None
    empty = [each.model_copy(update={"n": 0, "value": None}) for each in found]
    assert make_verdict(empty, VARIANTS, 5) is None


def test_results_with_a_verdict_are_read_back():
    verdict = make_verdict(results_of([WITHIN] * 6), VARIANTS, 5)
    written = document().model_copy(update={"verdict": verdict})
    assert ResultsDocument.model_validate_json(written.to_json()).verdict == verdict
    assert "verdict" not in document().to_data(), "which runs of before do not have"
