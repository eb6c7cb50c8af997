"""Forecasts of bytes against the tensors of caches, for every base and modifier."""

import pytest
import torch

import kvtool
from kvtool.documents.memory import ModelShape
from kvtool.errors import UsageError
from kvtool.generation import decode_step, prefill
from kvtool.model_shape import layer_shapes
from kvtool.planning.bytes import Text, forecast, grown
from kvtool.planning.held import even_budgets
from kvtool.policies.table import ALLOCATORS, BASES, MODIFIERS
from tests.models_for_tests import any_cache, cutting, family_model, peaky_model, random_ids
from tests.planning.documents import shape

pytestmark = pytest.mark.few(2)

ON = {
    "ada": "snapkv(window=8)",
    "chunk": "snapkv(window=8)",
    "calidrop": "snapkv(window=8)",
    "refit": "snapkv(window=8)",
    "critical": "snapkv(window=8)",
    "duo": "h2o",
}
MODIFIED = [f"{ON.get(name, 'h2o')}+{name}" for name in MODIFIERS if name != "optimal"]
OTHERS = [
    "h2o+calidrop",
    "adakv(window=8)+calidrop",
    "h2o+ada",
    "h2o+every(steps=7)",
    "h2o+every(steps=9)+calidrop",
    "keydiff+ada+every(steps=5)",
    "triattention(every=7,prompt=false)",
    "snapkv(window=8)+every(steps=9)",
    "pyramidkv(window=8)+every(steps=9)+calidrop",
    "adakv(window=8)+every(steps=5)",
    "snapkv(window=8)+cam",
    "streaming(positions=cache)",
    "rocketkv(window=8,skip_layers=1)",
    "quest(skip_layers=2,k=20)",
]
BUDGET = 40
TEXTS = [(90, 0), (90, 1), (90, 12), (300, 70), (40, 3), (38, 12), (30, 5)]


def small(base: str) -> str:
    """A base whose window is smaller than the budget, and which cuts its prompt."""
    windows = ("snapkv", "adakv", "rocketkv", "rocketkv-mt")
    return f"{base}(window=8)" if base in windows else cutting(base)


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama", num_hidden_layers=3, head_dim=32))


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


@pytest.mark.few(5)
@pytest.mark.each_once
@pytest.mark.parametrize("mode", ["full", "block:32"])
@pytest.mark.parametrize("name", [*(small(base) for base in BASES), *MODIFIED, *OTHERS])
def test_what_is_forecast_is_held(model, name, mode):
    policy = kvtool.parse_policy(name)
    budget = BUDGET if policy.takes_budget else None
    by_entry = policy.allocator is not None and policy.allocator.metric is not None
    batch = 1 if by_entry else 2  # rows of unlike splits are side by side, as wide as the wider
    for n, new in TEXTS if mode == "full" else TEXTS[2:4]:
        held, report = most_held(model, policy, budget, n, new, batch, mode)
        found = forecast_of(model, policy, budget, n, new, batch)
        assert found.storage == held, (n, new)
        assert found.full_storage == (n + new) * batch * 3 * 2 * 2 * 32 * 4
        if new:
            assert found.traffic == report.traffic_bytes, (n, new)


def test_every_modifier_is_tried():
    assert {name.split("+")[1] for name in MODIFIED} == set(MODIFIERS) - {"optimal"}
    assert set(ALLOCATORS) - {"optimal", "curves"} <= set(MODIFIERS)


@pytest.mark.each_once
@pytest.mark.parametrize("policy", ["h2o", "snapkv(window=4)", "rocketkv(window=4)", "quest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "falcon_h1", "lfm2", "llama4"])
def test_families_and_dtypes(family, dtype, policy):
    model = kvtool.attach(family_model(family).to(dtype))
    held, _ = most_held(model, policy, 24, 60, 6)
    assert forecast_of(model, kvtool.parse_policy(policy), 24, 60, 6).storage == held


@pytest.mark.parametrize("policy", ["h2o", "tova", "snapkv(window=4)"])
@pytest.mark.parametrize("family", ["deepseek_v3", "falcon", "gemma3n", "gemma4"])
def test_latents_and_one_head_for_all(family, policy):
    model = kvtool.attach(family_model(family))
    held, _ = most_held(model, policy, 24, 60, 6)
    assert forecast_of(model, kvtool.parse_policy(policy), 24, 60, 6).storage == held


def test_a_worked_layer(model):
    """RoCo: 41 slots of 2 heads x (2 x 32 x 4 bytes + a position and 3 numbers), 3 layers, 2 rows.

    D2O remembers a threshold per head beside 1 number.
    """
    roco = forecast_of(model, kvtool.parse_policy("roco"), 40, 90, 5)
    assert roco.storage == 2 * 3 * 41 * 2 * (256 + 16)
    assert roco.traffic == 2 * 3 * 41 * 2 * 256
    d2o = forecast_of(model, kvtool.parse_policy("d2o"), 40, 90, 5)
    assert d2o.storage == 2 * 3 * 2 * (41 * (256 + 8) + 4)


def test_heads_of_a_prompt_that_some_keep_whole(model):
    """DuoAttention at 700 of 1000 tokens: share 60 / 360 of 6 heads is one head, 640 the others."""
    found = forecast_of(model, kvtool.parse_policy("duoattention"), 700, 1000, 7)
    assert found.storage == 2 * (1007 + 5 * 641) * (256 + 4)
    held, _ = most_held(model, "duoattention", 700, 1000, 7)
    assert found.storage == held


@pytest.mark.parametrize("name", ["h2o", "d2o(merge=none)+uniform", "snapkv(window=8)", "h2o+ada"])
@pytest.mark.parametrize("n", [90, 30])
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
    for tokens in range(91, 160):
        decode_step(model, cache, random_ids(1)[0])
        capacity = capacity if capacity >= tokens else grown(capacity, tokens)
        assert layer.slots.capacity == capacity
    assert capacity > 160
