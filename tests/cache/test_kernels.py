"""The kernel that a model was loaded with runs inside kvtool's attention; results are the same."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch.nn import functional

import kvtool
from kvtool.generation import decode_step, prefill
from tests.models_for_tests import peaky_model, random_ids


def fake_flash(query, key, value, softmax_scale, causal, window_size):
    """What flash-attn's function computes: its causal mask is aligned to the last key."""
    assert causal
    q_len, kv_len = query.shape[1], key.shape[1]
    row = torch.arange(kv_len - q_len, kv_len)[:, None]
    column = torch.arange(kv_len)
    mask = column <= row
    if window_size[0] >= 0:
        mask &= column >= row - window_size[0]
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=softmax_scale, enable_gqa=True
    )
    return out.transpose(1, 2)


@pytest.mark.parametrize(
    ("family", "policy"), [("llama", "snapkv(window=4)"), ("mistral", "streaming")]
)
def test_flash_and_eager_give_what_sdpa_gives(monkeypatch, family, policy):
    calls = []
    module = ModuleType("flash_attn")
    module.flash_attn_func = lambda *args, **kw: calls.append(1) or fake_flash(*args, **kw)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    changes = {"sliding_window": 11} if family == "mistral" else {}
    model = kvtool.attach(peaky_model(family, **changes))
    ids, results = random_ids(50), {}
    for kernel in ("sdpa", "eager", "flash_attention_2"):
        cache = kvtool.build_cache(model, policy, 20, prefill="block:16")
        cache.settings = replace(cache.settings, kernel=kernel)
        steps = [prefill(model, cache, ids), decode_step(model, cache, torch.tensor([5]))]
        results[kernel] = torch.stack(steps)
    assert calls, "the flash function was never used"
    for kernel in ("eager", "flash_attention_2"):
        torch.testing.assert_close(results[kernel], results["sdpa"], atol=1e-4, rtol=1e-4)


def test_the_kernel_is_the_one_the_model_was_loaded_with():
    model = peaky_model("llama", kernel="eager")
    assert kvtool.build_cache(model, "h2o", 8).settings.kernel == "eager"
    kvtool.attach(model)
    assert kvtool.build_cache(model, "h2o", 8).settings.kernel == "eager"
    kvtool.detach(model)
    assert model.config._attn_implementation == "eager"
