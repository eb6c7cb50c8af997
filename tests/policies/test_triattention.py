"""TriAttention: worked example, slow twin, and a model against the oracle; what is refused."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtool
from kvtool import parse_policy
from kvtool.cache.features.queries import Moments
from kvtool.errors import KvtoolError, UsageError
from kvtool.generation import decode_step, prefill
from kvtool.maths.pairs import pair_lengths
from kvtool.maths.rotation import Rotation
from kvtool.policies.every import Every
from kvtool.policies.evidence import MomentsAsked, QueryMoments
from kvtool.policies.parts import Evidence, Score, SlotView
from kvtool.policies.policy import Policy
from kvtool.policies.scores.triattention import pull_of_centres, standardised
from tests.cache.test_moments import OWN, YARN
from tests.cache.test_oracle import follow
from tests.contract.cases import Case
from tests.contract.checks import CHECKS
from tests.contract.test_contract import OF_PAIRS
from tests.models_for_tests import (
    FAMILIES,
    anchored_model,
    family_model,
    peaky_model,
    prompt,
    random_ids,
)
from tests.reference.expected import AskingOracle
from tests.reference.policies import Paced
from tests.reference.triattention import TriAttention

KEYS = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 1], [2, 0, 0, 0], [0, 0, 1, 1], [0, 2, 0, 0]]
QUERIES = [[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 0], [2, 0, 0, 0], [0, 0, 1, 1]]
PULLS = [0.097084, 0.677993, 0.971271, 1.098234, 0.736908, 0.959128]
FREQUENCIES = [1.0, 0.1]


def moments_of(queries, rotation):
    """Of (heads, tokens, dim) before RoPE."""
    queries = torch.as_tensor(queries).float()
    rotated = (0, False) if rotation is None else (len(rotation.frequencies), rotation.interleaved)
    lengths = pair_lengths(queries, rotated[0], interleaved=rotated[1]).mean(1)
    return QueryMoments(queries.mean(1)[None], None, 1.0, rotation, lengths[None])


def placed(keys, rotation, places):
    """Keys (heads, tokens, dim) before RoPE as they are stored."""
    keys = torch.as_tensor(keys).float()[None]
    return keys if rotation is None else rotation.shift(keys, places.float()[None, None])


def twin_of(keys, queries, rotation, horizon=65536):
    """The slow twin, which is shown stored keys (heads, tokens, dim) and queries before RoPE."""
    about = {}
    if rotation is not None:
        about = {"frequencies": rotation.frequencies.tolist(), "interleaved": rotation.interleaved}
    twin = TriAttention(1, horizon=horizon, **about)
    twin.look([dict(enumerate(head)) for head in keys.tolist()])
    twin.hear(torch.as_tensor(queries).tolist())
    return twin


# ---- the score


def test_worked_pulls():
    rotation = Rotation(torch.tensor(FREQUENCIES), False)
    moments = moments_of([QUERIES], rotation)
    assert moments.mean[0, 0].tolist() == pytest.approx([0.8, 0.4, 0.4, 0.4])
    assert moments.lengths[0, 0].tolist() == pytest.approx([1.2, 0.8])
    keys = placed([KEYS], rotation, torch.arange(6))
    found = pull_of_centres(keys, moments, 6, horizon=4)
    assert found[0, 0, 0].tolist() == pytest.approx(PULLS, abs=1e-6)
    twin = twin_of(keys[0], [QUERIES], rotation, horizon=4)
    slow = [twin.pull(0, key, place) for place, key in enumerate(keys[0, 0].tolist())]
    assert slow == pytest.approx(PULLS, abs=1e-6)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.data())
def test_scores_equal_the_slow_twin_in_any_order_of_slots(seed, data):
    source = torch.Generator().manual_seed(seed)
    heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    slots, pairs = data.draw(st.integers(2, 12)), data.draw(st.integers(0, 2))
    dim, horizon = data.draw(st.sampled_from([4, 5, 7])), data.draw(st.sampled_from([1, 6, 65536]))
    rotation = Rotation(torch.tensor([1.0, 0.03][:pairs]), data.draw(st.booleans()))
    rotation = rotation if pairs else None
    queries = torch.randn(heads * group, slots, dim, generator=source) + 1
    places = torch.randperm(slots, generator=source)
    keys = placed(torch.randn(heads, slots, dim, generator=source), rotation, torch.arange(slots))
    view = view_of(keys[:, :, places], moments_of(queries, rotation), places)
    ours = parse_policy(f"triattention(horizon={horizon})").ranking.importance({}, view, None)
    twin = twin_of(keys[0], queries, rotation, horizon)
    for head in range(heads):
        slow = twin.scores(head, range(slots), None)
        assert ours[0, head, places.argsort()].tolist() == pytest.approx(slow, abs=2e-4)


def view_of(keys, moments, places, budget=20):
    slots = places.shape[-1]
    positions = places.to(torch.int32).expand(*keys.shape[:2], slots)
    seen = int(places.max()) + 1
    held = (places >= 0).sum().view(1, 1, 1)
    return SlotView((keys,), positions, seen, budget, held, keys=(keys,), moments=(moments,))


def test_an_empty_slot_takes_no_part():
    source = torch.Generator().manual_seed(0)
    rotation = Rotation(torch.tensor(FREQUENCIES), True)
    moments = moments_of(torch.randn(4, 9, 4, generator=source), rotation)
    keys = torch.randn(1, 2, 9, 4, generator=source)
    places = torch.tensor([0, 1, -1, 3, 4, -1, 6, 7, 8])
    stored = places >= 0
    ranking = parse_policy("triattention").ranking
    found = ranking.importance({}, view_of(keys, moments, places), None)
    kept = ranking.importance({}, view_of(keys[:, :, stored], moments, places[stored]), None)
    assert (found[:, :, ~stored] == 0).all()
    torch.testing.assert_close(found[:, :, stored], kept)


def test_equal_keys_are_not_blown_up():
    """The deviation of numbers that differ by rounding alone is not divided by."""
    numbers = torch.tensor([[[[1.0, 1.0 + 1e-7, 1.0]]]])
    assert standardised(numbers, torch.ones(1, 1, 3).bool()).abs().max() < 1


def test_many_slots_are_measured_as_few_are():
    source = torch.Generator().manual_seed(1)
    keys = torch.randn(1, 1, 2500, 4, generator=source)
    rotation = Rotation(torch.tensor(FREQUENCIES), False)
    moments = moments_of(torch.randn(1, 30, 4, generator=source), rotation)
    odd = torch.arange(2500) % 7 == 3
    whole = pull_of_centres(keys, moments, 2500, 64)
    some = pull_of_centres(keys[:, :, odd], moments, 2500, 64)
    torch.testing.assert_close(whole[..., odd], some)


# ---- a model


def options_of(model, interleaved=False):
    """How a model rotates, for the twin."""
    rotary = model.model.rotary_emb
    frequencies = rotary.inv_freq.tolist()
    return {
        "frequencies": frequencies,
        "interleaved": interleaved,
        "factor": rotary.attention_scaling,
    }


def same_as_the_oracle(model, mode="full", length=61, interleaved=False, **options):
    about = options_of(model, interleaved)
    inside = ",".join(f"{key}={value}" for key, value in options.items()).lower()
    follow(
        model,
        lambda: Paced(TriAttention(24, **options, **about), 5),
        f"triattention({inside},every=5)",
        24,
        mode,
        prompt(length),
        new=12,
        kind=AskingOracle,
    )


@pytest.mark.parametrize(
    ("mode", "options", "family"),
    [("block:20", {"recent": 3}, "llama"), ("full", {"recent": 128, "horizon": 6}, "qwen3")],
)
def test_kept_positions_and_logits_equal_the_oracle(mode, options, family):
    same_as_the_oracle(anchored_model(family), mode, prompt=False, **options)


def test_the_prompt_stays_as_in_the_oracle():
    for recent in (4, 128):  # of which half of what the prompt leaves is taken
        same_as_the_oracle(anchored_model("llama"), length=13, prompt=True, recent=recent)


@pytest.mark.parametrize(
    ("family", "interleaved"), [("yarn", False), ("cohere", True), ("glm4", True)]
)
def test_other_rotations_equal_the_oracle(family, interleaved, monkeypatch):
    """A factor beside the rotation; pairs side by side; half a head."""
    monkeypatch.setattr("tests.models_for_tests.FAMILIES", FAMILIES | OWN)
    model = family_model(family)
    if family == "yarn":
        assert model.model.rotary_emb.attention_scaling > 1, YARN
    same_as_the_oracle(model, interleaved=interleaved, prompt=False, recent=3)


@pytest.mark.parametrize("family", ["opt", "gpt_neox"])
def test_other_families_cut_and_go_on(family, monkeypatch):
    """Without RoPE, and with half a head that rotates; the next test has layers that differ."""
    monkeypatch.setattr("tests.models_for_tests.FAMILIES", FAMILIES | OWN)
    model = kvtool.attach(family_model(family))
    cache = kvtool.build_cache(model, "triattention(every=4,prompt=false)", 12)
    prefill(model, cache, random_ids(30))
    for token in random_ids(9, seed=2)[0]:
        assert torch.isfinite(decode_step(model, cache, token[None])).all()
    assert {len(layer[0, 0]) for layer in map(cache.kept_positions, range(2))} == {13}


def test_layers_that_decide_together_keep_what_each_would_alone(monkeypatch):
    """Of layers that rotate in two ways and in none, each goes by moments of its own."""
    monkeypatch.setattr("tests.models_for_tests.FAMILIES", FAMILIES | OWN)
    for family in ("gemma3", "smollm3"):
        model = kvtool.attach(family_model(family))
        caches = [
            kvtool.build_cache(model, "triattention(every=4,prompt=false)", 12) for _ in range(2)
        ]
        for cache in caches:
            prefill(model, cache, random_ids(30))
        caches[1].groups.form = lambda layers, running: None
        for token in random_ids(9, seed=2)[0]:
            logits = [decode_step(model, cache, token[None]) for cache in caches]
            torch.testing.assert_close(*logits)
        assert caches[0].groups.by_layer
        assert not caches[1].groups.by_layer
        for layer in range(4):
            kept = [cache.kept_positions(layer) for cache in caches]
            assert torch.equal(*kept)


def kept(cache, layer=0):
    return [set(head.tolist()) for head in cache.kept_positions(layer)[0]]


def test_the_prompt_stays_and_what_is_generated_is_cut_every_few_tokens():
    model, counts = kvtool.attach(peaky_model("llama")), []
    cache = kvtool.build_cache(model, "triattention(every=6,recent=3)", 24)
    prefill(model, cache, random_ids(18))
    for token in random_ids(30, seed=2)[0]:
        decode_step(model, cache, token[None])
        counts.append(cache.kept_positions(0).shape[-1])
        assert all(head >= set(range(18)) for head in kept(cache))
    assert counts == [*range(19, 30), *([24, 25, 26, 27, 28, 29] * 4)[:19]]
    assert cache.slot_layers[0].slots.capacity == 30
    assert all(head >= {45, 46, 47} for head in kept(cache, 1))


@pytest.mark.parametrize("modifier", ["", "+ada", "+int8"])
def test_a_long_prompt_stays_beside_the_recent_window_in_every_turn(modifier):
    model = kvtool.attach(peaky_model("llama", head_dim=32))
    cache = kvtool.build_cache(model, f"triattention(every=6){modifier}", 40)
    prefill(model, cache, random_ids(27))
    for token in random_ids(20, seed=2)[0]:
        decode_step(model, cache, token[None])
        assert all(head >= set(range(27)) for head in kept(cache))
    prefill(model, cache, random_ids(9, seed=3))
    for token in random_ids(20, seed=4)[0]:
        decode_step(model, cache, token[None])
        for head in kept(cache):
            assert head >= {*range(27), *range(47, 56)}
            newest = cache.tokens_seen()[0] - 1
            assert newest in head


def test_a_prompt_above_the_budget_is_refused_with_its_number():
    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, "triattention", 24)
    told = "its 24 tokens and one that is generated exceed the budget of 24"
    with pytest.raises(UsageError, match=told) as caught:
        prefill(model, cache, random_ids(24))
    assert caught.value.hint == "a budget of 25 tokens or more"
    prefill(model, kvtool.build_cache(model, "triattention", 25), random_ids(24))


def test_what_is_generated_does_not_move_the_centres():
    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, "triattention(every=6,prompt=false)", 20)
    prefill(model, cache, random_ids(40))
    before = [dict(Moments.of(layer).state) for layer in cache.slot_layers]
    for token in random_ids(20, seed=2)[0]:
        decode_step(model, cache, token[None])
    for layer, state in zip(cache.slot_layers, before, strict=True):
        assert state.keys() == {"count", "mean", "lengths"}
        for name, number in Moments.of(layer).state.items():
            assert torch.equal(number, state[name])
    prefill(model, cache, random_ids(12, seed=3))
    assert Moments.of(cache.slot_layers[0]).state["count"].unique().tolist() == [52]


def test_a_file_with_lengths_below_0_is_refused(tmp_path):
    from tests.cache.test_sealed_files import reseal

    model, path = kvtool.attach(peaky_model("llama")), tmp_path / "a.safetensors"
    cache = kvtool.build_cache(model, "triattention(prompt=false)", 20)
    prefill(model, cache, random_ids(50))
    kvtool.save_cache(cache, path)

    def alter(metadata, tensors):
        tensors["layer.1.moments.lengths"] = -tensors["layer.1.moments.lengths"]

    reseal(path, alter)
    with pytest.raises(KvtoolError, match=r"`layer.1.moments.lengths` holds numbers out of their"):
        kvtool.load_cache(path, model)


@pytest.mark.exhaustive
@pytest.mark.parametrize("modifier", ["ada+int8", "d2o-merge", "calidrop(calibration_size=9)"])
@pytest.mark.parametrize("name", OF_PAIRS)
def test_the_contract_holds_with_modifiers(modifier, name):
    CHECKS[name](Case(f"triattention(every=7,prompt=false)+{modifier}", "again"))


def test_any_score_with_a_pace_may_look_at_moments_while_it_decodes():
    seen = []

    @dataclass(frozen=True)
    class Mean(Score):
        name, paper, evidence = "mean", "-", Evidence.MOMENTS

        @property
        def moments(self):
            return MomentsAsked(covariance=False)

        @property
        def pace(self):
            return Every(4)

        def importance(self, state, view, rows):
            seen.append([each.lengths for each in view.moments])
            means = [each.mean.unflatten(1, (2, -1)).mean(2) for each in view.moments]
            pairs = zip(view.keys, means, strict=True)
            return torch.cat([(keys.float() @ mean[..., None])[..., 0] for keys, mean in pairs])

    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, Policy(Mean()), 12)
    prefill(model, cache, random_ids(30))
    for token in random_ids(9, seed=2)[0]:
        decode_step(model, cache, token[None])
    assert seen == [[None], [None], [None, None], [None, None]]  # blocks by layer, then together


# ---- what is refused


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("triattention(every=0)", "triattention: every must be 1 or more, got 0"),
        ("triattention(recent=-1)", "triattention: recent must be 0 or more, got -1"),
        ("triattention(horizon=0)", "triattention: horizon must be 1 or more, got 0"),
        ("triattention(positions=cache)", "has no parameter `positions`"),
        ("triattention+caote", "`caote` weighs values by attention scores"),
        ("triattention+chunk", "`chunk` chooses among the tokens of a prompt"),
        ("triattention+every", "`triattention` cuts every so many tokens by itself"),
        ("triattention+ada+calidrop", "cannot follow heads of unequal counts"),
    ],
)
def test_what_makes_no_sense_is_refused(policy, told):
    with pytest.raises(UsageError) as found:
        parse_policy(policy)
    assert told in str(found.value)
    if policy.endswith("+every"):
        assert found.value.hint == "triattention(every=64)"


def test_at_most_half_the_budget_is_the_recent_window():
    policy = parse_policy("triattention(recent=8)")
    assert [policy.score.reserved(budget) for budget in (6, 40)] == [{"recent": 3}, {"recent": 8}]
    policy.check_budget(1)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("falcon", "runs its own eager attention"),
        ("deepseek_v3", "stores latents in place of keys"),
        ("dynamic", "turns its keys by the length of the text"),
    ],
)
def test_what_cannot_be_turned_back_is_refused(family, reason, monkeypatch):
    monkeypatch.setattr("tests.models_for_tests.FAMILIES", FAMILIES | OWN)
    with pytest.raises(KvtoolError, match=reason) as caught:
        kvtool.build_cache(family_model(family), "triattention", 20)
    assert "policy `triattention` is not available for" in str(caught.value)
