import pytest
import torch

import kvtool
from kvtool.errors import KvtoolError
from kvtool.policies.codec.int4 import Int4
from kvtool.profiling.output_error import _Sums as Sums
from kvtool.profiling.output_error import output_error
from tests.cache.test_key_bias import narrowed_by_hand, ranges_by_hand
from tests.models_for_tests import family_model, peaky_model, random_ids

MODES = ["isolated", "end_to_end"]


def test_the_worked_example():
    sums = Sums()
    full, ours = [[1.1, 0.7], [2.0, 0.0]], [[1.2, 0.6], [1.0, 0.0]]
    for o, other in zip(full, ours, strict=True):
        sums.add(0, torch.tensor(o), torch.tensor(other))
    assert sums.ratios() == {0: pytest.approx(0.178947, abs=1e-6)}


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama"))


def measure(model, policy, budget, mode):
    cache = kvtool.build_cache(model, policy, budget)
    return output_error(model, cache, random_ids(60), random_ids(9, seed=5), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["h2o+caote", "snapkv(window=4)"])
def test_a_budget_that_fits_moves_nothing(model, policy, mode):
    assert max(measure(model, policy, 200, mode)) < 1e-10


@pytest.mark.parametrize("policy", ["h2o", "full+fp8", "snapkv(window=4)+fp8"])
def test_the_first_layer_errs_alike_in_both_modes(model, policy):
    isolated = measure(model, policy, 20, "isolated")
    through = measure(model, policy, 20, "end_to_end")
    assert isolated[0] > 1e-6
    assert isolated[0] == pytest.approx(through[0], rel=1e-4)
    assert isolated[1] != pytest.approx(through[1], rel=1e-3)


def rounded_keys(keys, prompt, layer, codec):
    """Store keys and bring them back, by the centre and the power of each channel of the prompt."""
    if codec is None:
        return keys
    centre, exponent = ranges_by_hand(prompt[None, None], [len(prompt)])
    moved, centred = (each[0, 0] for each in narrowed_by_hand(keys[None, None], centre, exponent))
    back = rounded(moved, layer, codec) * 2 ** exponent[0, 0]
    return torch.where(centred, back + centre[0, 0], -back)


def rounded(vectors, layer, codec):
    """Store vectors and bring them back, number by number, as the formats are defined."""
    if codec is None:
        return vectors
    largest, shared = (127, vectors.shape[-1]) if codec == "int8" else (7, 32)
    dim, turn = vectors.shape[-1], None
    if codec == "int4":
        turn = Int4().rotation(layer, dim, vectors.device).rotate(torch.eye(dim))
    back = []
    for vector in vectors if turn is None else vectors @ turn:
        numbers = []
        for group in vector.split(shared):
            scale = float((group.abs().max() / largest).half())
            codes = [max(-largest, min(largest, round(x / scale))) for x in group.tolist()]
            numbers += [code * scale for code in codes]
        back.append(torch.tensor(numbers))
    return torch.stack(back) if turn is None else torch.stack(back) @ turn.T


@pytest.mark.parametrize(
    ("base", "codec"),
    [
        ("streaming", None),
        ("streaming", "int4(rotate=false)"),
        pytest.param("full", "int8", marks=pytest.mark.exhaustive),
        pytest.param("full", "int4", marks=pytest.mark.exhaustive),
    ],
)
def test_isolated_errors_equal_a_plain_loop(base, codec):
    """What StreamingLLM keeps is known, so its error can be written down from the definition."""
    model = kvtool.attach(peaky_model("llama", head_dim=32))
    sinks, budget, prompt, steps = 4, 20, 60, 9
    seen = {}

    def watch(step, call, out):
        seen.setdefault(step.layer.index, []).append((call, out))

    full = kvtool.build_cache(model, "full")
    full.watch_steps(watch)
    ids = torch.cat([random_ids(prompt), random_ids(steps, seed=5)], 1)
    kvtool.generation.prefill(model, full, ids[:, :prompt])
    for token in ids[0, prompt:]:
        kvtool.generation.decode_step(model, full, token[None])
    policy = base if codec is None else f"{base}+{codec}"
    size_of_budget = budget if base == "streaming" else None
    for index, ratio in enumerate(measure(model, policy, size_of_budget, "isolated")):
        error = size = 0.0
        for step, (call, out) in enumerate(seen[index][1:]):
            held = prompt + step + 1
            recent = range(held - 1 - (budget - sinks), held)  # one more than stays after the step
            places = [*range(sinks), *recent] if base == "streaming" else [*range(held)]
            for head in range(call.query.shape[1]):
                group = head // (call.query.shape[1] // call.key.shape[1])
                own, values = call.key[0, group], call.value[0, group, places]
                keys = rounded_keys(own[places], own[:prompt], index, codec)
                values = rounded(values, index, codec)
                weights = (keys @ call.query[0, head, 0] * call.scale).softmax(0)
                error += (weights @ values - out[0, head, 0]).square().sum().item()
                size += out[0, head, 0].square().sum().item()
        assert error / size > 1e-7
        assert ratio == pytest.approx(error / size, rel=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_fewer_bits_move_the_output_further(mode):
    model = kvtool.attach(peaky_model("llama", head_dim=32))
    bits = [measure(model, f"full+{codec}", None, mode) for codec in ("int8", "fp8", "int4")]
    for layer in range(2):
        eight, floats, four = (errors[layer] for errors in bits)
        assert 1e-7 < eight < floats < four < 0.5
    evicted = measure(model, "h2o", 20, mode)
    assert measure(model, "h2o+int8", 20, mode) == pytest.approx(evicted, rel=0.2)


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "qwen3_next"])
def test_other_families_agree_where_everything_fits(name):
    model = kvtool.attach(family_model(name))
    for mode in MODES:
        cache = kvtool.build_cache(model, "h2o", 200)
        errors = output_error(model, cache, random_ids(60), random_ids(9, seed=5), mode)
        assert max(errors) < 1e-10


def test_what_cannot_be_replayed_is_refused():
    model = kvtool.attach(family_model("deepseek_v3"))
    with pytest.raises(KvtoolError, match="latent"):
        measure(model, "h2o", 20, "isolated")
    model = kvtool.attach(family_model("falcon"))
    with pytest.raises(KvtoolError, match="does not show"):
        measure(model, "h2o", 20, "end_to_end")
