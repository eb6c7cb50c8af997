"""Slots that hold codes: the same as attending to what the codes stand for, written out in float.

The twin runs the policy without its codec, on slots that hold the decoded numbers: whatever comes
to them is rounded by the codec and dequantised before it is stored.
"""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvtool
from kvtool.cache.slots import slot_form
from kvtool.cache.steps import attend
from kvtool.generation import decode_step, prefill
from kvtool.maths.attention import attention_weights, group_queries, weighted_values
from tests.coded import TIE_LOGITS, decoded_slots
from tests.models_for_tests import family_model, peaky_model, random_ids
from tests.tiers import first

CODECS = ("int8", "fp8", "int4", "int4(rotate=false)", "k8v4", "int(keys=4,values=8)")
POLICIES = (
    "full",
    "h2o",
    "h2o+caote",
    "roco+fastcaote",
    "keydiff",
    "knorm",
    "snapkv(window=4)",
    "expected",
    "lagkv(lag=5)",
    "rkv(window=4,buffer=6)",
    "h2o+ada",
    "adakv(window=4)",
    "streaming(positions=cache)",
    "tova(positions=cache)+caote",
    "h2o+every(steps=5)",
    "snapkv(window=4)+every(steps=5)",
    "h2o+calidrop(theta1=0.45,theta2=0.6)",
    "snapkv(window=4)+calidrop(theta1=0.45,theta2=0.6)",
    "sirllm",
    "pyramidinfer(min_context=2)",
    "d2o(merge=none)",
    "random",
)
KINDS = ("fp8", "k8v4")  # floats and integers; both sides alike and not; rotated and not


def run(model, policy, budget, mode="full", text=0):
    """Logits of two turns of a text with decoded tokens, and the cache."""
    cache = kvtool.build_cache(model, policy, None if policy.startswith("full") else budget)
    if mode != "full":
        cache = kvtool.build_cache(model, policy, cache.budget, prefill=mode)
    first, answer, second, rest = (
        random_ids(size, seed=seed + 10 * text) for size, seed in ((40, 0), (9, 3), (7, 4), (4, 5))
    )
    found = [prefill(model, cache, first)]
    found += [decode_step(model, cache, token) for token in answer[0].split(1)]
    found += [prefill(model, cache, second)]
    found += [decode_step(model, cache, token) for token in rest[0].split(1)]
    return torch.cat([each.view(1, -1) for each in found]), cache


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama", head_dim=32))


def both(model, policy, codec, mode, text):
    found, cache = run(model, f"{policy}+{codec}", 16, mode, text)
    with decoded_slots(codec):
        return found, cache, *run(model, policy, 16, mode, text)


def same(model, policy, codec, mode, atol=3e-4):
    """Compare slots of codes with slots of floats that have been through the codec.

    The last bit of a number differs between both, and with it a code where it lies between two: on
    some processors of one text in some hundreds, which then has to hold for another text.
    """
    found, cache, expected, twin = both(model, policy, codec, mode, 0)
    if not torch.allclose(found, expected, atol=atol, rtol=1e-3):
        torch.testing.assert_close(found, expected, atol=TIE_LOGITS, rtol=1e-3)
        found, cache, expected, twin = both(model, policy, codec, mode, 1)
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-3)
    for layer in cache.slot_layers:
        kept = cache.kept_positions(layer.index)
        assert torch.equal(kept, twin.kept_positions(layer.index))
    assert cache.report().allocated_bytes < twin.report().allocated_bytes


def coded() -> list[tuple[str, str, str]]:
    """Every policy once, with the codecs and the ways of reading a prompt in turn."""
    modes = ("full", "block:8")
    return [
        (policy, CODECS[i % len(CODECS)], modes[i // len(CODECS) % 2])
        for i, policy in enumerate(POLICIES)
    ]


@pytest.mark.few(4)
@pytest.mark.parametrize(("policy", "codec", "mode"), coded())
def test_codes_are_what_they_stand_for(model, policy, codec, mode):
    same(model, policy, codec, mode)


@pytest.mark.parametrize("codec", KINDS)
def test_slices_make_no_difference(model, codec, monkeypatch):
    found, _ = run(model, f"h2o+caote+{codec}", 16)
    monkeypatch.setattr(attend, "SLICE", 5)
    monkeypatch.setattr(slot_form, "SLICE", 3)
    sliced, _ = run(model, f"h2o+caote+{codec}", 16)
    torch.testing.assert_close(sliced, found, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "family",
    first(2, ["gemma2", "deepseek_v3", "gpt_oss", "llama4", "gemma3n", "falcon", "falcon_h1"]),
)
def test_every_kind_of_layer(family):
    """Sliding windows, chunks, sinks, capped logits, latents, shared keys, own attention."""
    same(kvtool.attach(family_model(family)), "h2o", "int8", "full", atol=2e-3)


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [("int8", torch.bfloat16), ("fp8", torch.float32), ("k8v4", torch.float16)],
)
def test_a_slot_is_rounded_once(codec, dtype):
    """In no dtype does a kept token's code change, whatever is cut and decoded behind it."""
    model = kvtool.attach(peaky_model("llama", head_dim=32).to(dtype))
    cache = kvtool.build_cache(model, f"streaming(sinks=4)+{codec}", 16, prefill="block:8")
    prefill(model, cache, random_ids(16))

    def sinks():
        slots = cache.first_layer.sorted_slots()
        assert slots.positions[0, :, :4].tolist() == [[0, 1, 2, 3]] * 2
        return {name: tensor[:, :, :4].clone() for name, tensor in slots.stored.items()}

    before = sinks()
    prefill(model, cache, random_ids(30, seed=2))
    for token in random_ids(8, seed=3)[0].split(1):
        decode_step(model, cache, token)
    prefill(model, cache, random_ids(9, seed=4))
    for name, tensor in sinks().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("codec", KINDS)
def test_attention_over_codes_is_that_over_decoded_numbers(model, codec):
    """To 1e-6 in float32, for logits that are not so large that their own rounding is larger."""
    cache = kvtool.build_cache(model, f"full+{codec}")
    prefill(model, cache, random_ids(40))
    calls = []
    cache.watch_steps(lambda step, call, out: calls.append((step.layer, call)))
    decode_step(model, cache, torch.tensor([5]))
    assert len(calls) == 2
    for layer, call in calls:
        calm = replace(call, query=0.05 * call.query)
        keys, values = layer.slots.dequantised()
        weights = attention_weights(group_queries(calm.query, 2), keys, scale=call.scale)
        stored = layer.slots.used_stored()
        token = attend.attend_codes(layer, calm, stored, None, observed=True)
        assert token.lse is None
        assert (token.rows.weights - weights).abs().max() <= 1e-6
        assert (
            token.out - weighted_values(weights, values)
        ).abs().max() <= 1e-6 * values.abs().max()


@pytest.mark.parametrize("codec", KINDS)
def test_a_prompt_attends_to_itself_exactly(model, codec):
    full, _ = run(model, "full", None)
    coded, cache = run(model, f"full+{codec}", None)
    assert torch.equal(coded[0], full[0])
    assert not torch.equal(coded[1], full[1])
    assert not any(tensor.is_floating_point() for tensor in (cache.layers[0].keys,))


@pytest.mark.parametrize(
    ("codec", "pair"),
    [("fp8", 34 + 34), ("int4(rotate=false)", 18 + 18), ("int(keys=4,values=8)", 18 + 34)],
)
def test_bytes_are_counted_from_tensors(model, codec, pair):
    _, cache = run(model, f"h2o+{codec}", 16)
    slots = cache.first_layer.slots
    assert slots.token_bytes == pair
    held = sum(t.numel() * t.element_size() for t in slots.stored.values())
    assert slots.kv_bytes == held == 17 * 2 * pair
    report = cache.report()
    assert report.kv_bytes == 2 * 2 * 16 * pair
    assert report.allocated_bytes == 2 * held
    assert report.full_bytes == 60 * 2 * 2 * 2 * 32 * 4


def test_each_side_has_the_codes_of_its_own_format(model):
    """Those of int8 and int4, bit for bit; a prompt has the same keys and values in all three."""
    stored = {}
    for codec in ("int8", "int4", "int(keys=8,values=4)"):
        cache = kvtool.build_cache(model, f"full+{codec}")
        prefill(model, cache, random_ids(40))
        stored[codec] = [layer.slots.used_stored() for layer in cache.slot_layers]
    for of_keys, of_values, mixed in zip(*stored.values(), strict=True):
        for name in ("keys", "key_scales"):
            assert torch.equal(mixed[name], of_keys[name])
        for name in ("values", "value_scales"):
            assert torch.equal(mixed[name], of_values[name])


def test_short_forms_compute_the_same_bit_for_bit(model):
    long, _ = run(model, "h2o+int(keys=4,values=4)", 16)
    assert torch.equal(long, run(model, "h2o+int4", 16)[0])


def test_copies_share_what_never_changes(model):
    _, cache = run(model, "h2o+int4", 16)
    own, other = (each.first_layer.slots.form for each in (cache, cache.copy()))
    assert other.rotations is own.rotations
    assert not {each.data_ptr() for each in own.ranges} & {each.data_ptr() for each in other.ranges}
    for ours, theirs in zip(own.ranges, other.ranges, strict=True):
        assert torch.equal(ours, theirs)


def test_a_nan_is_refused():
    model = kvtool.attach(peaky_model("llama", head_dim=32))
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    with pytest.raises(kvtool.KvtoolError, match="hold NaN"):
        run(model, "full+int8", None)


@pytest.mark.parametrize("codec", CODECS[:4])
def test_a_nan_of_a_decoded_token_is_not_hidden(model, codec):
    """Its scale is NaN, so that what attends to it is; kvtool looks at logits anyway."""
    cache = kvtool.build_cache(model, f"full+{codec}")
    prefill(model, cache, random_ids(9))
    slots = cache.first_layer.slots
    key, value = (tensor[:, :, :1].clone() for tensor in slots.dequantised())
    slots.write(key.index_fill_(-1, torch.tensor([3]), float("nan")), value, static=False)
    assert slots.dequantised()[0][:, :, -1].isnan().all()
    assert not slots.dequantised()[0][:, :, :-1].isnan().any()


class Largest(TorchDispatchMode):
    """The largest tensor of floats that an operation has made, in bytes, beside the weights'."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                views = operation in (torch.ops.aten.t.default, torch.ops.aten.detach.default)
                self.bytes = max(self.bytes, 0 if views else tensor.numel() * 4)
        return made


@pytest.mark.parametrize(("policy", "codec"), [("full", "k8v4"), ("h2o", "fp8")])
def test_no_layer_is_ever_in_float_beside_its_codes(model, policy, codec, monkeypatch):
    monkeypatch.setattr(attend, "SLICE", 64)
    budget = None if policy == "full" else 700
    cache = kvtool.build_cache(model, f"{policy}+{codec}", budget)
    prefill(model, cache, random_ids(750))
    decode_step(model, cache, torch.tensor([5]))
    with Largest() as watched:
        decode_step(model, cache, torch.tensor([6]))
    slots = cache.first_layer.slots
    layer = slots.used * 2 * 32 * 4  # its keys, or its values
    one_slice = 64 * 2 * 32 * 4
    weights = 2 * 8 * slots.used * 4  # of both layers, which decide together
    assert one_slice <= watched.bytes <= max(one_slice, weights) < layer / 3
