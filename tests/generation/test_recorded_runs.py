"""Known texts, comparisons and watched steps where steps are recorded; and what never is."""

import logging
from types import SimpleNamespace

import pytest
import torch

import kvtool
from kvtool.cache.whole.layers import why_not
from kvtool.generation import follow, graphs, prefill, token_scores
from kvtool.generation.graphs import StaticDecoding
from kvtool.policies.grammar import parse_policy
from tests import tape
from tests.models_for_tests import peaky_model, random_ids


@pytest.fixture
def recordings(monkeypatch):
    """What is recorded, on a CPU."""
    made = []
    monkeypatch.setattr(graphs, "recorder", tape.recorder(made))
    monkeypatch.setattr(graphs, "_told", set())
    return made


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama", num_hidden_layers=1, head_dim=32))


def filled(model, policy="h2o"):
    cache = kvtool.build_cache(model, policy, 20)
    return cache, prefill(model, cache, random_ids(40))


def test_a_known_text_is_followed_and_scored_by_recorded_steps(model, recordings):
    def run():
        cache, logits = filled(model)
        followed = follow(model, cache, logits, random_ids(12, seed=2))
        text = random_ids(12, seed=3)
        return followed, *token_scores(model, cache, text, chunk=1, first_logits=logits)

    with graphs.recording(False):
        expected = run()
    assert not recordings
    torch.testing.assert_close(run(), expected)
    assert [each.replays for each in recordings] == [9, 10]  # the first one fills the budget


def test_steps_that_are_watched_run_one_by_one(model, recordings):
    """As those of a profile, of which every one is shown."""
    cache, logits = filled(model)
    seen = []
    cache.watch_steps(lambda *step: seen.append(step))
    follow(model, cache, logits, random_ids(12, seed=2))
    assert len(seen) == 11
    assert not recordings


@pytest.mark.parametrize("wanted", [True, False])
def test_a_comparison_records_its_steps_unless_it_is_told_not_to(wanted, recordings, tmp_path):
    settings = {"tasks": "niah", "lengths": 128, "samples": 1, "policies": "h2o", "budgets": 48}
    results = kvtool.evaluate(None, tmp_path / "run", graphs=wanted, **settings)
    assert results.complete
    assert bool(recordings) == wanted


@pytest.mark.parametrize("policy", ["sirllm", "h2o+calidrop"])
def test_a_policy_whose_steps_ask_the_host_says_so_once(policy, model, recordings, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            cache, logits = filled(model, policy)
            follow(model, cache, logits, random_ids(6, seed=2))
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith(f"kvtool: steps of `{policy}` on `llama` run one operation at a time")
    assert line.endswith(why_not(parse_policy(policy), "static"))
    assert not recordings


def test_a_model_on_several_devices_says_so_once(monkeypatch, model, caplog):
    monkeypatch.setattr(graphs, "_told", set())
    monkeypatch.setattr(StaticDecoding, "_run", lambda *given: None)
    spread = SimpleNamespace(
        device=torch.device("cuda"), hf_device_map={"a": 0, "b": 1}, config=model.config
    )
    cache, _ = filled(model)
    with caplog.at_level(logging.WARNING):
        steps = StaticDecoding(spread, 64)
        for _ in range(3):
            steps.feed(cache, torch.tensor([2]))
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.endswith("the model is on several devices")
    assert steps.steps.eager_steps == 3
