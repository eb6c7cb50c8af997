"""CaliDrop in a cache: against an oracle that forgets nothing, and against the full cache."""

import math

import pytest
import torch

import kvtool
from kvtool.cache.features.calidrop import Calibration, offload_evicted
from kvtool.errors import KvtoolError
from kvtool.generation import decode_step, prefill
from kvtool.policies.evicted.calidrop import CaliDrop
from kvtool.policies.evicted.eviction import Eviction
from kvtool.policies.numbers import ALL_HERE
from tests.models_for_tests import anchored_model, family_model, peaky_model, prompt, random_ids
from tests.reference import policies
from tests.reference.calidrop import CalibratingOracle
from tests.tiers import first, first_rows

LENGTH, BUDGET, NEW = 41, 20, 16
MODES = {"full": None, "block:20": 20}
ALWAYS = "(theta1=2,theta2=3)"


@pytest.fixture
def model(family):
    yield kvtool.detach(anchored_model(family))
    kvtool.detach(anchored_model(family))


@pytest.mark.parametrize(
    ("family", "mode", "base", "settings", "theta1", "theta2", "granularity"),
    first_rows(
        2,
        [
            ("llama", "block:20", "h2o", {}, 0.4, 0.6, "head"),
            ("qwen3", "full", "snapkv", {"window": 8}, 0.7, 0.85, "layer"),
            ("llama", "full", "streaming", {}, 0.4, 0.6, "layer"),
            ("qwen3", "block:20", "tova", {}, -3, 0.5, "head"),
        ],
    ),
)
def test_kept_positions_and_logits_equal_the_oracle(
    model, mode, base, settings, theta1, theta2, granularity
):
    slow = CalibratingOracle(
        model,
        lambda: policies.build(base, BUDGET, **settings),
        theta1,
        theta2,
        granularity == "layer",
    )
    ids, tokens = prompt(LENGTH), prompt(NEW, seed=1)
    size = MODES[mode] or LENGTH
    for start in range(0, LENGTH, size):
        expected = slow.feed(ids[start : start + size])
    slow.in_prompt = False
    inside = ",".join(f"{key}={value}" for key, value in settings.items())
    policy = f"{base}({inside})" if inside else base
    policy += f"+calidrop(theta1={theta1},theta2={theta2},granularity={granularity})"
    cache = kvtool.build_cache(kvtool.attach(model), policy, BUDGET, prefill=mode)
    ours = prefill(model, cache, torch.tensor([ids]))
    for step in range(NEW + 1):
        if step:
            expected = slow.feed([tokens[step - 1]])
            ours = decode_step(model, cache, torch.tensor([tokens[step - 1]]))
        for layer in range(3):
            assert cache.kept_positions(layer)[0].tolist() == slow.kept[layer]
        torch.testing.assert_close(ours[0], expected, atol=2e-4, rtol=2e-4)
    counts = torch.tensor(list(slow.counts.values())).float()
    if granularity == "head" and theta1 > 0:
        assert (counts[:, :2].sum(0) > 3).all()  # it recomputes, and leaves alone
    shares = counts[:, 0] / (counts[:, 1] + counts[:, 2])
    assert cache.report().recompute_frequency == pytest.approx(shares.tolist())


def outputs(model, policy, budget, ids, tokens, mode="full", mask=None):
    """Logits, and every output of every attention."""
    cache = kvtool.build_cache(model, policy, budget, prefill=mode)
    seen = []
    cache.watch_steps(lambda step, call, out: seen.append(out))
    logits = [prefill(model, cache, ids, mask)]
    logits += [decode_step(model, cache, token) for token in tokens]
    return cache, torch.stack(logits), seen


@pytest.mark.parametrize(
    ("base", "mode"),
    first_rows(
        1,
        [
            ("h2o+caote", "block:16"),
            ("snapkv(window=4)", "full"),
            ("adakv(window=4)", "full"),
            ("pyramidkv", "block:16"),
        ],
    ),
)
def test_always_recomputed_it_is_the_full_cache(base, mode):
    model = kvtool.attach(peaky_model("llama"))
    ids, tokens = random_ids(60), random_ids(70, seed=1).T  # longer than what gathers
    _, expected, full = outputs(model, "full", None, ids, tokens)
    cache, logits, ours = outputs(model, f"{base}+calidrop{ALWAYS}", 20, ids, tokens, mode)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    if mode == "full":
        first = zip(ours[::2], full[::2], strict=True)  # of the layer that sees the same input
        for mine, theirs in first:
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert cache.report().recompute_frequency == [1.0, 1.0]
    _, plain, _ = outputs(model, base, 20, ids, tokens[:2], mode)
    assert not torch.allclose(plain, expected[:3], atol=0.1)  # without it, it would not be


@pytest.mark.parametrize("family", first(1, ["gemma2", "gpt_oss", "falcon_h1"]))
def test_families_with_attention_of_their_own(family):
    model = kvtool.attach(family_model(family))
    ids, tokens = random_ids(60), random_ids(6, seed=1).T
    for mode in ("full", "block:16"):
        _, expected, _ = outputs(model, "full", None, ids, tokens, mode)
        cache, logits, _ = outputs(model, f"h2o+calidrop{ALWAYS}", 20, ids, tokens, mode)
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
        frequency = cache.report().recompute_frequency
        windows = [getattr(layer, "window", None) for layer in cache.layers]
        assert frequency == [1.0 if window is None else None for window in windows]


def test_bfloat16_stays_close():
    model = kvtool.attach(peaky_model("llama").to(torch.bfloat16))
    ids, tokens = random_ids(60), random_ids(6, seed=1).T
    _, expected, _ = outputs(model, "full", None, ids, tokens)
    _, plain, _ = outputs(model, "h2o", 20, ids, tokens)
    _, logits, _ = outputs(model, f"h2o+calidrop{ALWAYS}", 20, ids, tokens)
    assert (logits - expected).abs().mean() < (plain - expected).abs().mean() / 10


@torch.no_grad()
def test_float64_is_calibrated_exactly():
    model = kvtool.attach(peaky_model("llama").double())
    ids, tokens = random_ids(40), random_ids(4, seed=1).T
    _, expected, _ = outputs(model, "full", None, ids, tokens)
    _, logits, _ = outputs(model, f"h2o+calidrop{ALWAYS}", 20, ids, tokens)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_what_is_held_carries_no_gradients():
    model, token = kvtool.attach(peaky_model("llama")), random_ids(1)
    cache = kvtool.build_cache(model, f"streaming+calidrop{ALWAYS}", 20)
    model(input_ids=random_ids(40), past_key_values=cache)
    assert model(input_ids=token, past_key_values=cache).logits.requires_grad
    for layer in cache.layers:
        assert not any(held.requires_grad for held in Calibration.of(layer).memory.values())
    assert cache.copy().get_seq_length() == 41


def test_smaller_stores_stay_close():
    model = kvtool.attach(peaky_model("llama"))
    ids, tokens = random_ids(90), random_ids(8, seed=1).T
    _, expected, _ = outputs(model, "full", None, ids, tokens)
    _, plain, _ = outputs(model, "h2o", 20, ids, tokens)
    exact, _, _ = outputs(model, f"h2o+calidrop{ALWAYS}", 20, ids, tokens)
    for form, times in (("bf16", 3), ("int8", 3), ("file", 1e5)):
        part = f"+calidrop(theta1=2,theta2=3,store={form})"
        cache, logits, _ = outputs(model, "h2o" + part, 20, ids, tokens)
        assert (logits - expected).abs().mean() * times < (plain - expected).abs().mean()
        assert (cache.report().host_bytes < exact.report().host_bytes * 0.6) == (form != "file")


def test_a_further_turn_is_calibrated_exactly():
    model = kvtool.attach(peaky_model("llama"))
    turn = random_ids(30, seed=7)
    logits = []
    for policy, budget in (("full", None), ("snapkv(window=4)+calidrop", 20)):
        cache = kvtool.build_cache(model, policy, budget)
        prefill(model, cache, random_ids(60))
        logits.append(prefill(model, cache, turn))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)
    assert cache.report().kept_per_layer == [20, 20]
    assert Calibration.of(cache.layers[0]).store.tokens == 70


def test_only_the_best_are_set_aside():
    model = kvtool.attach(peaky_model("llama"))
    ids, tokens = random_ids(60), random_ids(4, seed=1).T
    part = "+calidrop(theta1=2,theta2=3,calibration_size=8)"
    small, logits, _ = outputs(model, "snapkv(window=4)" + part, 20, ids, tokens)
    wide = kvtool.build_cache(model, "snapkv(window=4)", 28)
    prefill(model, wide, ids)
    store = Calibration.of(small.layers[0]).store
    aside, kept = store.segments[0].tensors[-1][0], small.kept_positions(0)[0, :, :20]
    together = torch.cat([aside, kept], 1).sort(-1).values
    assert torch.equal(together, wide.kept_positions(0)[0])
    wide = kvtool.build_cache(model, "snapkv(window=4)", 28)
    same = [prefill(model, wide, ids)] + [decode_step(model, wide, token) for token in tokens]
    torch.testing.assert_close(logits, torch.stack(same), atol=1e-4, rtol=1e-4)


def test_the_report_counts_what_is_on_either_side():
    model = kvtool.attach(peaky_model("llama"))
    cache, _, _ = outputs(model, "snapkv(window=4)+calidrop", 20, random_ids(60), [])
    report = cache.report()
    pair, position, heads = 2 * 16 * 4, 4, 2
    assert report.kv_bytes == 2 * heads * 20 * pair
    assert report.host_bytes == 2 * heads * 40 * (pair + position)
    held = 8 * (16 + 16 + 1 + 3) * 4  # query, output, log-sum-exp and counts of each query head
    assert report.state_bytes == 2 * (heads * 20 * position + held)


@pytest.mark.parametrize("rows", [[1, 1, 0], [1]])
def test_an_entry_of_which_nothing_was_set_aside_counts_no_step_wherever_it_is(rows):
    model = kvtool.attach(peaky_model("llama"))
    ids = random_ids(40, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :32] = 0  # fits
    cache = kvtool.build_cache(model, "streaming+calidrop", 20)
    prefill(model, cache, ids, mask)
    cache.batch_select_indices(torch.tensor(rows))
    for token in random_ids(5, seed=1, batch=len(rows)).T:
        decode_step(model, cache, token)
    for layer in cache.slot_layers:
        steps = Calibration.of(layer).memory["steps"]
        counted = [5.0 if row == 0 else 0.0 for row in rows]
        assert steps.amax(-1).tolist() == steps.amin(-1).tolist() == counted


def worked(**settings):
    """A layer of one head that has set aside two tokens of the worked example."""
    keys = torch.tensor([[[[1.0, 0], [0, 1], [1, 1], [-1, 0]]]])
    values = torch.tensor([[[[1.0, 0], [0, 1], [2, 2], [4, 0]]]])
    layer = Calibration(CaliDrop(**settings))
    query = torch.tensor([[[[9.0, 9.0], [1.0, 1.0]]]])
    layer._scale = 2**-0.5
    layer.hold_last(query, 2, torch.tensor([[2, 3]]))
    stay, gone = torch.tensor([[[0, 2]]]), torch.tensor([[[1, 3]]])
    layer.offload(
        Eviction(
            keys=keys,
            values=values,
            state={},
            evicted=gone,
            evicted_positions=gone.int(),
            kept_keys=keys[:, :, ::2],
            kept_values=values[:, :, ::2],
            kept_state={},
            kept_positions=stay.int(),
            tokens_seen=4,
            layer=0,
            whole=True,
            importance=torch.zeros(1, 1, 4),
        )
    )
    return layer, keys, values


def test_the_worked_example_is_folded_in():
    layer, _, _ = worked()
    torch.testing.assert_close(
        layer.memory["out"][0, 0], torch.tensor([0.782281, 0.804430]), atol=1e-6, rtol=0
    )
    assert layer.memory["lse"].item() == pytest.approx(0.924729, abs=1e-6)


def test_a_query_that_turns_six_degrees_a_step_recomputes_every_eighth():
    layer, _, _ = worked()
    turn = math.radians(6)
    for step in range(1, 241):
        angle = math.pi / 4 + step * turn
        query = torch.tensor([[[[math.cos(angle), math.sin(angle)]]]])
        ticket = layer.begin_decode(query, 1, None, ALL_HERE)
        layer.end_decode(ticket, query, torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 1), 0)
    assert layer.recompute_frequency == 1 / 8
    assert (layer.memory["calibrated"] / layer.memory["steps"]).item() == 0.75


def test_a_victim_of_decoding_is_folded_in_exactly():
    layer, keys, values = worked()
    leaving = keys[:, :, 2:3], values[:, :, 2:3]
    offload_evicted([layer], [leaving], torch.tensor([[[2]]], dtype=torch.int32), whole=True)
    logits = keys[0, 0, 1:] @ torch.ones(2) * 2**-0.5
    expected = torch.softmax(logits, 0) @ values[0, 0, 1:]
    torch.testing.assert_close(layer.memory["out"][0, 0], expected)
    torch.testing.assert_close(layer.memory["lse"][0, 0], logits.logsumexp(0))
    assert layer.store.tokens == 3


def test_what_cannot_work_is_refused():
    with pytest.raises(KvtoolError, match="`calidrop` compares queries, and the eager attention"):
        outputs(kvtool.attach(family_model("falcon")), "h2o+calidrop", 20, random_ids(60), [])
    with pytest.raises(KvtoolError, match="this model stores latents"):
        outputs(kvtool.attach(family_model("deepseek_v3")), "h2o+calidrop", 20, random_ids(60), [])
