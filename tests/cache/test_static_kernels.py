"""Static steps through one operator keep and compute what eager steps of plain torch do."""

from __future__ import annotations

import pytest
import torch

import kvtool
from kvtool.cache.steps import attend
from kvtool.generation import decode_step, prefill
from kvtool.generation.compiled import CompiledDecoding
from kvtool.kernels import trust
from tests.kernels.drawn import DEVICE
from tests.models_for_tests import peaky_model, random_ids

pytest.importorskip("triton")

from kvtool.kernels import decode_token as operators

LENGTH, BUDGET, STEPS = 26, 16, 4


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(attend, "TRITON_DEVICES", {DEVICE, "cpu", "cuda"})


def counted(monkeypatch, name):
    """Note the calls of a function that an operator makes."""
    right, calls = getattr(operators, name), []

    def noted(*args, **options):
        calls.append(options.get("new"))
        return right(*args, **options)

    monkeypatch.setattr(operators, name, noted)
    return calls


def filled(model, policy, padded):
    cache = kvtool.build_cache(model, policy, None if policy.startswith("full") else BUDGET)
    ids = random_ids(LENGTH, batch=2).to(DEVICE)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, : LENGTH - 8] = 0
    prefill(model, cache, ids, mask)
    return cache


def static(model, cache, token):
    """A static step that nothing compiles."""
    if not cache.fix_shapes(STEPS):
        return decode_step(model, cache, token)

    def forward(**inputs):
        with cache.static_step():
            return model.forward(**inputs)

    return decode_step(model, cache, token, forward)


def compare(monkeypatch, policy, padded, backend, tolerance=1e-4, model=None):
    model = model or peaky_model("llama", num_attention_heads=4, num_hidden_layers=1, head_dim=32)
    model = kvtool.attach(model.to(DEVICE))
    monkeypatch.setattr(trust, "usable", lambda *_, **__: False)
    tokens = [torch.full((2,), token, device=DEVICE) for token in range(5, 5 + STEPS)]
    plain = filled(model, policy, padded)
    expected = [decode_step(model, plain, token) for token in tokens]
    compiling = torch.compiler.is_compiling
    monkeypatch.setattr(trust, "usable", lambda *_, **__: not compiling())
    cache = filled(model, policy, padded)
    calls = counted(monkeypatch, "attend_codes" if cache.policy.codec else "attend_slots")
    step = static if backend is None else CompiledDecoding(model, STEPS, backend=backend)
    found = [step(model, cache, token) for token in tokens]
    stores = sum(len(layer.stores) for layer in cache.slot_layers)
    evicting = cache.slot_layers[0].evicts_tokens  # whose first step is not static
    assert len(calls) == (STEPS - (evicting and cache.policy.codec is None)) * stores
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=tolerance, rtol=0)
    for one, other in zip(cache.slot_layers, plain.slot_layers, strict=True):
        assert torch.equal(cache.kept_positions(one.index), plain.kept_positions(one.index))
        for mine, theirs in zip(one.stores, other.stores, strict=True):
            held = mine.slots.sorted_slots(), theirs.slots.sorted_slots()
            there = held[1].positions >= 0
            for name in held[1].state:
                states = (each.state[name].masked_fill(~there, 0) for each in held)
                torch.testing.assert_close(*states, atol=1e-4, rtol=1e-4)
    return calls


PLAIN = ["h2o", "h2o+caote", "full", "roco", "tova", "streaming", "snapkv(window=4)"]
PLAIN += ["adakv(window=4)", "scissorhands", "h2o+ada", "recency"]


@pytest.mark.few(2)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("policy", PLAIN)
def test_static_steps_equal_eager_ones(monkeypatch, policy, padded):
    compare(monkeypatch, policy, padded, None)


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
@pytest.mark.parametrize("policy", PLAIN)
def test_compiled_steps_equal_eager_ones(monkeypatch, policy, backend):
    compare(monkeypatch, policy, policy in PLAIN[::2], backend)


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["h2o+int8", "tova+fp8", "full+int4"])
def test_codes(monkeypatch, policy):
    compare(monkeypatch, policy, False, None, tolerance=1e-2)
    torch._dynamo.reset()
    compare(monkeypatch, policy, False, "aot_eager", tolerance=1e-2)
