"""The table of losses is that of the committed results, and what lies between its points."""

import json
from pathlib import Path

import pytest

from kvtool.planning.lost_answers import CODECS, MEASURED, NOISE, PROMPT, Loss, of_points, packaged

RESULTS = Path(__file__).parents[2] / "recipes" / "real-model" / "results"


def derived():
    """Losses by policy and budget, known and later; None is the budget of the full cache."""
    found = {}
    for when in ("known", "later"):
        results = json.loads((RESULTS / f"{when}.json").read_text())["results"]
        full = next(each["value"] for each in results if each["variant"] == "full")
        for each in results:
            policy, _, budget = each["variant"].partition("@")
            key = policy, int(budget) if budget else None
            found.setdefault(key, []).append(round(full - each["value"], 2))
    return {key: tuple(losses) for key, losses in found.items()}


def test_the_table_is_that_of_the_results():
    measured = derived()
    listed = {(policy, b): loss for policy, row in MEASURED.items() for b, loss in row.items()}
    listed |= {(f"full+{codec}", None): loss for codec, loss in CODECS.items()}
    assert listed == {key: measured[key] for key in listed}
    for policy in MEASURED:  # every budget that was measured
        assert set(MEASURED[policy]) == {b for name, b in measured if name == policy}


def test_the_length_and_the_noise_are_those_of_the_results():
    for when in ("known", "later"):
        results = json.loads((RESULTS / f"{when}.json").read_text())["results"]
        assert {round(each["cost"]["prompt_tokens"]) for each in results} == {PROMPT}
        assert {each["n"] for each in results} == {100}
        assert max(each["stderr"] for each in results) <= NOISE + 0.001


def test_a_loss_between_two_points_is_on_their_line():
    losses = packaged()
    at = losses.at("keydiff", (256 + 512) / 2 / PROMPT)
    assert (at.known, at.later) == pytest.approx((0.14, 0.20))
    at = losses.at("keydiff", (3 * 256 + 512) / 4 / PROMPT)  # nearer to the first
    assert (at.known, at.later) == pytest.approx((0.16, 0.225))
    at = losses.at("keydiff", 256 / PROMPT)
    assert (at.known, at.later) == pytest.approx((0.18, 0.25))
    assert losses.at("keydiff", 1.0) == Loss(0.0, 0.0)
    assert losses.at("keydiff", 0.0) == Loss(1.0, 1.0)
    half = losses.at("keydiff", 64 / PROMPT)  # half way to nothing kept
    assert (half.known, half.later) == pytest.approx(((1 + 0.54) / 2, (1 + 0.61) / 2))
    assert losses.at("quest", 256 / PROMPT) == Loss(0.0, 0.0)  # a gain is no loss
    assert losses.at("my_peak:Peak", 0.5) is None


def test_codecs_that_were_not_measured_lose_as_much_as_one_that_was():
    losses = packaged()
    assert losses.of_codec(None) == Loss(0.0, 0.0)
    assert losses.of_codec("fp8") == losses.of_codec("int8") == Loss(0.0, 0.01)
    assert losses.of_codec("k8v4") == losses.of_codec("int4") == Loss(0.02, 0.02)
    assert losses.of_codec("int2") is None


def test_the_source_says_where_keys_have_biases():
    losses = packaged(key_biases=True)
    assert losses.codecs == packaged().codecs
    assert losses.source.startswith(packaged().source)
    assert "Qwen2.5-Coder-0.5B" in losses.source
    assert "Qwen2.5-Coder-0.5B" not in packaged().source


def test_the_least_share_is_the_smallest_one_within_the_noise():
    assert packaged().least_share("quest") == 256 / PROMPT
    assert packaged().least_share("h2o") is None


def test_results_of_one_kind_of_question_say_nothing_of_the_other():
    points = [("h2o", 0.25, Loss(0.1, None)), ("full+int8", 1.0, Loss(0.01, None))]
    losses = of_points("measured here", points)
    assert losses.at("h2o", 0.25) == Loss(0.1, None)
    assert losses.at("h2o", 0.625) == Loss(pytest.approx(0.05), None)
    assert losses.of_codec("int8") == Loss(0.01, None)
    assert losses.at("h2o", 0.25).plus(losses.of_codec("int8")).worse == pytest.approx(0.11)
    assert losses.offered == ["h2o"]
