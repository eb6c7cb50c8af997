"""Forecasts of bytes against the tensors of caches, for every way in which a policy stores.

The battery compares each base and modifier with its plan at one length (`tests/contract`).
"""

import pytest
import torch

import kvtool
from kvtool.documents.memory import ModelShape
from kvtool.errors import UsageError
from kvtool.generation import decode_step, prefill
from kvtool.model_shape import layer_shapes
from kvtool.planning.budgets import even_budgets
from kvtool.planning.bytes import Text, forecast, grown
from kvtool.policies.table import MODIFIERS
from tests.models_for_tests import any_cache, family_model, peaky_model, random_ids
from tests.planning.documents import shape
from tests.tiers import first

ON = {
    "ada": "snapkv(window=8)",
    "chunk": "snapkv(window=8)",
    "calidrop": "snapkv(window=8)",
    "refit": "snapkv(window=8)",
    "critical": "snapkv(window=8)",
    "duo": "h2o",
}
# swept by `tests/cli/test_plans_hold.py`
MODIFIED = [f"{ON.get(name, 'h2o')}+{name}" for name in MODIFIERS if name != "optimal"]
KINDS = [
    "full",
    "h2o+int8",
    "d2o",
    "h2o+calidrop",
    "snapkv(window=8)+refit",
    "adakv(window=8)+calidrop",
    "triattention(every=7,prompt=false)",
    "quest(skip_layers=1,k=20)",
    "rocketkv(window=8,skip_layers=1)",
    # the exhaustive tier from here
    "sirllm",
    "streaming(positions=cache)+fp8",
    "duoattention",
    "expected",
    "rkv",
    "kvzip",
    "pyramidinfer",
    "hsa",
    "loki",
    "sparq",
    "rocketkv-mt(window=8)",
    "h2o+d2o-alloc",
    "h2o+ada+int4(rotate=false)",
    "h2o+every(steps=9)+calidrop",
    "pyramidkv(window=8)+every(steps=9)+k8v4",
    "full+int4",
]
BUDGET = 40
TEXTS = [(90, 0), (90, 1), (90, 12), (150, 20), (40, 3), (38, 6), (38, 2)]


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama", head_dim=32))


def most_held(model, policy, budget, n, new, batch=2, mode="full", tight=True):
    """Bytes that are held at most, after the prompt and after every new token; and the cache."""
    cache = any_cache(model, policy, budget, prefill=mode)
    cache.meter.promised = tight
    prefill(model, cache, random_ids(n, batch=batch), new_tokens=new)
    held = [bytes_of(cache)]
    for token in random_ids(new + 1, seed=1)[0][:new]:
        decode_step(model, cache, token.expand(batch))
        held.append(bytes_of(cache))
    return max(held), cache.report()


def bytes_of(cache) -> int:
    """Keys, values and state, from the tensors."""
    report = cache.report()
    return report.allocated_bytes + report.state_bytes


def forecast_of(model, policy, budget, n, new, batch=2):
    shape = ModelShape.of(model.config, name="m", dtype=str(model.dtype).removeprefix("torch."))
    text = Text(n, new, batch, shape.vocabulary)
    layers = layer_shapes(model.config, shape.dtype)
    budgets = even_budgets(policy, budget or n, layers, text)
    return forecast(policy, layers, budgets, text)


@pytest.mark.parametrize("name", first(9, KINDS))
def test_what_is_forecast_is_held(model, name):
    policy = kvtool.parse_policy(name)
    budget = BUDGET if policy.takes_budget else None
    by_entry = policy.allocator is not None and policy.allocator.metric is not None
    batch = 1 if by_entry else 2  # rows of unlike splits are side by side, as wide as the wider
    for mode, n, new in [("block:32", 90, 12), *(("full", *text) for text in TEXTS)]:
        held, report = most_held(model, policy, budget, n, new, batch, mode)
        found = forecast_of(model, policy, budget, n, new, batch)
        assert found.storage == held, (mode, n, new)
        assert found.keys_values == report.allocated_bytes
        assert found.full_storage == (n + new) * batch * 2 * 2 * 2 * 32 * 4
        if new:
            assert found.traffic == report.traffic_bytes, (mode, n, new)


FAMILY_CASES = [
    ("gemma3", "h2o", "float32"),
    ("llama4", "h2o+int8", "bfloat16"),
    ("falcon_h1", "rocketkv(window=4)", "bfloat16"),
    ("deepseek_v3", "snapkv(window=4)+fp8", "float32"),
    ("gemma3n", "tova", "float32"),
    # the exhaustive tier from here
    ("gpt_oss", "snapkv(window=4)", "bfloat16"),
    ("lfm2", "quest", "float32"),
    ("falcon", "h2o", "float32"),
    ("gemma4", "snapkv(window=4)", "float32"),
]


@pytest.mark.parametrize("case", first(5, FAMILY_CASES), ids=" ".join)
def test_layers_of_unlike_shapes_are_forecast(case):
    """Windows, chunks, latents, one head for all, layers without a cache, and shared layers."""
    family, name, dtype = case
    model, policy = family_model(family), kvtool.parse_policy(name)
    kvtool.attach(model.to(getattr(torch, dtype)))
    held, report = most_held(model, policy, 24, 60, 6)
    found = forecast_of(model, policy, 24, 60, 6)
    assert (found.storage, found.traffic) == (held, report.traffic_bytes)


def test_a_worked_layer(model):
    """RoCo: 41 slots of 2 heads x (2 x 32 x 4 bytes + a position and 3 numbers), 2 layers, 2 rows.

    D2O remembers a threshold per head beside 1 number.
    """
    roco = forecast_of(model, kvtool.parse_policy("roco"), 40, 90, 5)
    assert roco.storage == 2 * 2 * 41 * 2 * (256 + 16)
    assert roco.traffic == 2 * 2 * 41 * 2 * 256
    d2o = forecast_of(model, kvtool.parse_policy("d2o"), 40, 90, 5)
    assert d2o.storage == 2 * 2 * 2 * (41 * (256 + 8) + 4)


def test_heads_of_a_prompt_that_some_keep_whole(model):
    """DuoAttention at 730 of 1000 tokens: share 90 / 360 of 4 heads is one head, 640 the others."""
    found = forecast_of(model, kvtool.parse_policy("duoattention"), 730, 1000, 7)
    assert found.storage == 2 * (1007 + 3 * 641) * (256 + 4)
    held, _ = most_held(model, "duoattention", 730, 1000, 7)
    assert found.storage == held


@pytest.mark.parametrize(("name", "n"), [("h2o+ada", 90), ("snapkv(window=8)", 90), ("h2o", 30)])
def test_padded_rows_hold_no_more_than_so_many_of_the_longest(model, name, n):
    policy, new = kvtool.parse_policy(name), 9
    ids, mask = random_ids(n, batch=3), torch.ones(3, n, dtype=torch.long)
    mask[1, :11], mask[2, :20] = 0, 0
    cache = any_cache(model, policy, BUDGET)
    cache.meter.promised = True
    prefill(model, cache, ids, mask, new_tokens=new)
    found = forecast_of(model, policy, BUDGET, n, new, batch=3).storage
    for token in random_ids(new, seed=1)[0]:
        assert bytes_of(cache) <= found
        decode_step(model, cache, token.expand(3))
    assert bytes_of(cache) <= found


def test_bytes_that_hold_no_number_are_refused():
    toy = shape(kv_bytes_per_token=4)
    with pytest.raises(UsageError, match="stores 4 bytes a token, too few for"):
        toy.layer_shapes()


def test_a_full_cache_appends_by_the_rule_that_forecasts_count_with(model):
    cache = kvtool.build_cache(model, "full")
    prefill(model, cache, random_ids(90))
    capacity, layer = 90, cache.slot_layers[0]
    for tokens in range(91, 132):
        decode_step(model, cache, random_ids(1)[0])
        capacity = capacity if capacity >= tokens else grown(capacity, tokens)
        assert layer.slots.capacity == capacity
    assert capacity > 132
