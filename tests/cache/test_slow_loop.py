"""The slot cache keeps what a plain loop keeps, token for token, and computes the same logits."""

from __future__ import annotations

import pytest
import torch

import kvtool
from kvtool.generation import decode_step, prefill
from tests.models_for_tests import peaky_model, random_ids
from tests.slow.model import SlowRun
from tests.slow.policies import POLICIES

LENGTH, BUDGET, BLOCK, NEW = 53, 23, 13, 32  # the last block has one token: 53 = 4 * 13 + 1

CASES = [
    ("recency", {}),
    ("streaming", {}),
    ("streaming", {"sinks": 2}),
    ("scissorhands", {}),
    ("h2o", {}),
    ("h2o", {"recent": 3}),
    ("tova", {}),
    ("tova", {"head_reduce": "kv_head"}),
    ("roco", {}),
    ("roco", {"sinks": 0, "protect_recent": 0, "scope": 7}),
    ("snapkv", {"window": 5, "kernel": 3}),
    ("snapkv", {"window": 5, "kernel": 5, "pool": "avg"}),
]
RUNS = [
    (name, options, rescore)
    for name, options in CASES
    for rescore in (None, "caote", "fastcaote")
    if rescore is None or name not in ("recency", "streaming")
]


def spell(name: str, options: dict, rescore: str | None) -> str:
    inside = ",".join(f"{key}={value}" for key, value in options.items())
    return name + (f"({inside})" if inside else "") + (f"+{rescore}" if rescore else "")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("prefill_mode", ["full", "block"])
@pytest.mark.parametrize(("name", "options", "rescore"), RUNS, ids=lambda value: str(value))
def test_kept_positions_and_logits_equal_a_plain_loop(family, prefill_mode, name, options, rescore):
    slow_model, fast_model = peaky_model(family), peaky_model(family)
    layers, heads = slow_model.config.num_hidden_layers, slow_model.config.num_key_value_heads
    slow = SlowRun(
        slow_model,
        [POLICIES[name](heads, BUDGET, rescore, **options) for _ in range(layers)],
    )
    kvtool.attach(fast_model)
    mode = "full" if prefill_mode == "full" else f"block:{BLOCK}"
    cache = kvtool.build_cache(fast_model, spell(name, options, rescore), BUDGET, prefill=mode)
    ids, new = random_ids(LENGTH), random_ids(NEW, seed=1)[0]

    size = LENGTH if prefill_mode == "full" else BLOCK
    for start in range(0, LENGTH, size):
        expected = slow.feed(ids[:, start : start + size], prompt=True)
    torch.testing.assert_close(prefill(fast_model, cache, ids), expected, atol=2e-4, rtol=1e-4)
    same_positions(cache, slow, layers)
    for token in new:
        expected = slow.feed(token.view(1, 1), prompt=False)
        logits = decode_step(fast_model, cache, token.view(1))
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
        same_positions(cache, slow, layers)


def same_positions(cache, slow, layers):
    for layer in range(layers):
        assert cache.kept_positions(layer)[0].tolist() == slow.kept(layer), f"layer {layer}"
