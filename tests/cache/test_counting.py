"""A cache whose attention counts as it runs keeps and computes what plain torch does."""

from __future__ import annotations

import pytest
import torch

import kvtool
from kvtool.cache.steps import attend, attend_block
from kvtool.cache.steps.attend_block import fused_block, needs_mask
from kvtool.cache.steps.call import StepContext
from kvtool.generation import decode_step, prefill
from kvtool.kernels import trust
from kvtool.kernels.checks import Family
from tests.kernels import torch_kernels
from tests.kernels.conftest import take_bfloat16_for_numbers  # noqa: F401
from tests.kernels.drawn import DEVICE
from tests.models_for_tests import family_model, peaky_model, random_ids
from tests.tiers import first, first_rows

pytest.importorskip("triton")

from kvtool.kernels import attend_causal

LENGTH, BUDGET, NEW = 21, 16, 2


def run(model, policy, mode, ids, mask=None):
    """Logits after the prompt and after each new token, and the kept positions of every layer."""
    kvtool.attach(model)
    cache = kvtool.build_cache(model, policy, BUDGET, prefill=mode)
    logits = [prefill(model, cache, ids, attention_mask=mask)]
    for token in range(5, 5 + NEW):
        logits.append(decode_step(model, cache, torch.full((len(ids),), token, device=ids.device)))
    layers = range(model.config.num_hidden_layers)
    return torch.stack(logits), [cache.kept_positions(layer) for layer in layers]


def compare(monkeypatch, model, policy, mode, ids, mask=None, tolerance=1e-4):
    model, ids = model.to(DEVICE), ids.to(DEVICE)
    mask = None if mask is None else mask.to(DEVICE)
    monkeypatch.setattr(trust, "usable", lambda *_, **__: False)
    plain = run(model, policy, mode, ids, mask)
    asked = []
    monkeypatch.setattr(attend, "TRITON_DEVICES", {DEVICE, "cpu", "cuda"})
    monkeypatch.setattr(trust, "usable", lambda *_, **__: asked.append(1) or True)
    counted = run(model, policy, mode, ids, mask)
    assert asked, "no kernel was offered"
    torch.testing.assert_close(counted[0], plain[0], atol=tolerance, rtol=tolerance)
    for one, other in zip(counted[1], plain[1], strict=True):
        for head, twin in zip(flat(one), flat(other), strict=True):
            assert head == twin


def flat(kept):
    return [sorted(p for p in head if p >= 0) for row in kept.tolist() for head in row]


def small_model(**changes):
    """A query head for every interpreted program is dear: four of them here."""
    return peaky_model("llama", num_attention_heads=4, **changes)


@pytest.mark.parametrize(
    ("policy", "mode"),
    first_rows(
        1,
        [
            ("h2o", "block:16"),
            ("roco+caote", "full"),
            ("scissorhands", "block:16"),
            ("tova", "full"),
            ("d2o", "full"),
            ("h2o+cam(deterministic=true)", "block:16"),
            ("h2o+ada", "full"),
            ("quest(page=2)", "full"),
            ("sparq", "full"),
            ("loki", "full"),
            ("exact-topk(scope=query_head)", "full"),
        ],
    ),
)
def test_policies_keep_the_same(monkeypatch, policy, mode):
    compare(monkeypatch, small_model(), policy, mode, random_ids(LENGTH))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("policy", "padded"),
    [
        ("h2o+int8", False),
        ("tova+fp8", True),
        ("roco+caote+int4", False),
        ("h2o+ada+k8v4", True),
        ("streaming+int(keys=4,values=8)", True),
    ],
)
def test_codes_are_read_where_they_lie(monkeypatch, policy, padded):
    ids = random_ids(LENGTH).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    model = small_model(head_dim=32)
    tolerance = 1e-2 if "4" in policy.rpartition("+")[2] else 1e-3  # a code may round to the next
    compare(monkeypatch, model, policy, "full", ids, mask if padded else None, tolerance=tolerance)


def with_key_bias(model, size=200.0):
    """Give one channel of every key, in the slowest pair of RoPE, a large constant part."""
    for layer in model.model.layers:
        key = layer.self_attn.k_proj
        heads = key.out_features // layer.self_attn.head_dim
        bias = key.weight.new_zeros(heads, layer.self_attn.head_dim)
        bias[:, layer.self_attn.head_dim // 2 - 1] = size
        key.bias = torch.nn.Parameter(bias.flatten())
    return model


@pytest.mark.parametrize("policy", first(1, ["h2o+int8", "roco+caote+int4"]))
def test_codes_of_biased_keys_are_read_where_they_lie(monkeypatch, policy):
    model = with_key_bias(small_model(head_dim=32))
    compare(monkeypatch, model, policy, "full", random_ids(LENGTH), tolerance=2e-3)


@pytest.mark.parametrize("family", first(1, ["gemma2", "gpt_oss"]))
def test_what_a_bias_adds_counts_under_a_cap_and_beside_sinks(family):
    """Every product of a query has the same number added, which only a softmax alone ignores."""
    model = kvtool.attach(with_key_bias(family_model(family), 60.0))
    ids, logits = random_ids(41), []
    for name in ("full", "full+int8"):
        cache = kvtool.build_cache(model, name)
        prefill(model, cache, ids)
        logits.append(decode_step(model, cache, torch.tensor([5])))
    assert any(layer.form.shifted for layer in cache.slot_layers)
    torch.testing.assert_close(logits[1], logits[0], atol=0.05, rtol=0.02)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("gemma2", "roco"),  # soft-capped logits, sliding layers
        ("gpt_oss", "h2o"),  # a sink logit per head, sliding layers
        ("deepseek_v3", "tova"),  # one latent for all heads
        ("gpt_oss", "hsa(page=2,k1=8)"),
    ],
)
def test_families_with_attention_of_their_own(monkeypatch, family, policy):
    model = family_model(family)
    model.config._attn_implementation = model.config._attn_implementation.replace("eager", "sdpa")
    compare(monkeypatch, model, policy, "full", random_ids(29))  # windows of 24


@pytest.mark.exhaustive
def test_padded_rows(monkeypatch):
    ids = random_ids(LENGTH, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    compare(monkeypatch, small_model(), "roco", "block:16", ids, mask)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "padding", "mode", "fused"),
    [
        ("llama", 0, "block:16", 2),  # the first of two, of each of two layers
        ("llama", 9, "block:16", 2),  # the first: padding goes behind the tokens
        ("mistral", 9, "block:16", 0),  # slides
    ],
)
def test_blocks_that_need_a_mask_run_in_kernels(monkeypatch, family, padding, mode, fused):
    """With a mask, sdpa would write all weights where query heads share keys."""
    causal = []

    def counted(layer, call, block):
        if trust.usable():
            assert not needs_mask(layer, call, block)
            causal.append(1)
        return fused_block(layer, call, block)

    monkeypatch.setattr(attend_block, "fused_block", counted)
    ids = random_ids(29, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    changes = {"sliding_window": 11} if family == "mistral" else {}
    changes["num_attention_heads"] = 4
    compare(monkeypatch, peaky_model(family, **changes), "streaming", mode, ids, mask)
    assert len(causal) == fused


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", ["roco", "h2o+ada", "scissorhands"])
def test_whole_prompts_in_halves_are_attended_by_torchs_own_kernel(monkeypatch, policy):
    """The columns are those that the log-sum-exp of kvtool's kernel gives."""
    model, ids = small_model(num_hidden_layers=1).to(DEVICE, torch.bfloat16), random_ids(LENGTH)
    attended, refused = [], {Family.CAUSAL}
    if DEVICE == "cpu":
        torch_kernels.put_in_place(monkeypatch)
    own = attend_causal.attend_causal
    monkeypatch.setattr(
        attend_causal, "attend_causal", lambda *a, **kw: attended.append(1) or own(*a, **kw)
    )
    monkeypatch.setattr(trust, "usable", lambda family, *_, **__: family not in refused)
    found = []
    for _ in range(2):
        kvtool.attach(model)
        cache = kvtool.build_cache(model, policy, BUDGET)
        prefill(model, cache, ids.to(DEVICE))
        found.append((flat(cache.kept_positions(0)), numbers(cache)))
        refused.clear()
    assert len(attended) == 1
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-4, rtol=1e-4)


def numbers(cache) -> list[torch.Tensor]:
    (layer,) = cache.slot_layers
    buffers = [layer.slots] if layer.ragged is None else [b.slots for b in layer.ragged.buckets]
    return [number[..., : each.used] for each in buffers for number in each.state.values()]


@pytest.mark.parametrize(
    ("family", "mode", "padding"),
    [("llama", "full", 9), ("llama", "block:16", 0), ("gemma2", "full", 0), ("gpt_oss", "full", 0)],
)
def test_what_needs_more_than_a_causal_mask_stays_with_kvtools_kernels(
    monkeypatch, family, mode, padding
):
    """In blocks, the first is a whole prompt of its own."""
    model = family_model(family).to(DEVICE, torch.bfloat16)
    model.config._attn_implementation = model.config._attn_implementation.replace("eager", "sdpa")
    ids, attended = random_ids(LENGTH, batch=2).to(DEVICE), []
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    torch_kernels.put_in_place(
        monkeypatch, lambda kernel: lambda *a, **kw: attended.append(1) or kernel(*a, **kw)
    )
    monkeypatch.setattr(trust, "usable", lambda *_, **__: True)
    cache = kvtool.build_cache(kvtool.attach(model), "h2o", 12, prefill=mode)
    prefill(model, cache, ids, attention_mask=mask if padding else None)
    assert len(attended) == (len(cache.slot_layers) if mode != "full" else 0)


def test_flash_attention_keeps_its_blocks():
    class Layer:
        padded, window, chunked = False, 11, False

    class OneBlock:
        kept = 5

    class Call:
        context, spans = StepContext("flash_attention_2"), None

    assert not needs_mask(Layer, Call, OneBlock)
    Layer.padded = True  # which flash-attn cannot do
    OneBlock.kept = 0
    assert needs_mask(Layer, Call, OneBlock)
    Layer.window = None
    assert needs_mask(Layer, Call, OneBlock)
    Layer.padded = False
    assert not needs_mask(Layer, Call, OneBlock)


def test_a_score_that_looks_at_rows_itself_is_given_them(monkeypatch):
    """Such a score needs weights in full, wherever it runs."""
    from kvtool.cache.steps.attend_triton import can_count
    from kvtool.policies.parts import Evidence
    from kvtool.policies.policy import Policy
    from kvtool.policies.scores.h2o import H2O

    monkeypatch.setattr(trust, "usable", lambda *_, **__: True)

    class Rows(H2O):
        evidence = Evidence.ALL_ROWS

    class Layer:
        policy, window = Policy(Rows()), None

    class Call:
        context, softcap, sinks = StepContext("sdpa"), None, None
        query, key, value = (
            torch.zeros(1, 4, 1, 8),
            torch.zeros(1, 2, 9, 8),
            torch.zeros(1, 2, 9, 8),
        )

    for family in (Family.ROWS, Family.SLOTS):
        Layer.policy, Call.context, Call.softcap = Policy(Rows()), StepContext("sdpa"), None
        assert not can_count(Layer, Call, family)
        Layer.policy = Policy(H2O())
        assert can_count(Layer, Call, family)
        Call.context = StepContext("eager")
        assert not can_count(Layer, Call, family)
        Call.softcap = 50.0
        assert can_count(Layer, Call, family)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["full", "block:64"])
@pytest.mark.parametrize("policy", ["h2o", "roco", "scissorhands", "tova", "d2o"])
def test_a_gpu_keeps_what_plain_torch_keeps(monkeypatch, policy, mode):
    assert DEVICE == "cuda"
    compare(monkeypatch, peaky_model("llama"), policy, mode, random_ids(300), tolerance=1e-3)
