"""Each text has draws of its own, and the same ones every time."""

import pytest
import torch

from kvtool.documents.settings import Protocol
from kvtool.evaluation.bench.bench import Bench
from kvtool.planning.variants import make_variants
from kvtool.policies.draws import drawn_for
from kvtool.policies.grammar import parse_policy
from kvtool.sizes import Budget


@pytest.mark.parametrize("text", ["h2o", "random", "random(seed=7)", "h2o+cam", "random+int8"])
def test_seeds_follow_from_the_text_and_the_policys_own(text):
    policy = parse_policy(text)
    first, again, other = (drawn_for(policy, name) for name in ("a", "a", "b"))
    assert first == again
    draws = "random" in text or "cam" in text
    assert (first is policy) == (not draws)
    assert (first != other) == draws
    for part in ("score", "evicted"):
        seeds = [getattr(getattr(each, part), "seed", None) for each in (policy, first, other)]
        assert len(set(seeds)) in (1, 3)


def test_seeds_of_the_policy_stay_apart():
    seeds = {drawn_for(parse_policy(f"random(seed={i})"), "a").score.seed for i in range(50)}
    assert len(seeds) == 50


def test_what_draws_nothing_keeps_its_seed():
    policy = parse_policy("h2o+cam(deterministic=true)")
    assert drawn_for(policy, "a") is policy


def test_samples_of_one_length_lose_other_positions(loaded):
    [variant] = make_variants([parse_policy("random")], [Budget.parse(16)], baseline=False)
    ids = torch.arange(5, 69)[None]

    def kept(draws):
        bench = Bench(loaded, variant, Protocol())
        bench.draw_for(draws)
        cache = bench.new_cache()
        bench.feed(cache, ids)
        return cache.kept_positions(0)[0, 0].tolist()

    assert kept("a") == kept("a")
    assert len({tuple(kept(name)) for name in (None, "a", "b")}) == 3
