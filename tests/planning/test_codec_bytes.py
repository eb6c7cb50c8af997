"""Bytes of quantised slots: worked ones, budgets and plans against the tensors of caches."""

import re

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import kvtool
from kvtool.documents.memory import DeviceMemory, ModelShape
from kvtool.documents.plan import Target
from kvtool.errors import UsageError
from kvtool.generation import compress, decode_step, prefill
from kvtool.model_shape import LayerShape, layer_shapes
from kvtool.planning.bytes import Text, check_dims, stored_bytes
from kvtool.planning.estimate import bytes_held, check_bytes, estimate_memory, largest_batch
from kvtool.planning.make_plan import make_plan
from kvtool.planning.peak import reading_bytes
from kvtool.planning.plan_in_use import check_run
from kvtool.policies.allocate.uniform import Uniform
from tests.evaluation.variants import make_variants
from tests.models_for_tests import family_model, peaky_model, random_ids
from tests.planning.test_forecast import bytes_of, forecast_of, most_held

DIM, HEADS, LAYERS = 32, 2, 2
BITS_8, BITS_4 = DIM + 2, DIM // 2 + DIM // 16  # bytes of a vector, with its scales
PAIR = {
    "int8": 2 * BITS_8,
    "fp8": 2 * BITS_8,
    "int4": 2 * BITS_4,
    "k8v4": BITS_8 + BITS_4,
    "int(keys=4,values=8)": BITS_4 + BITS_8,
}
BUDGET, PROMPT, NEW = 40, 90, 12
SIZE = 24_000  # bytes
NOTHING = DeviceMemory(device="cpu", free_bytes=None, weights_bytes=0)


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama", head_dim=DIM))


@pytest.mark.parametrize("codec", PAIR)
def test_a_worked_slot(model, codec):
    """H2O: 41 slots of 2 heads, each of two vectors, a position and the attention received.

    Beside them each head has 3 bytes for every channel of its keys: where it lies, and how wide.
    """
    cache = kvtool.build_cache(model, f"h2o+{codec}", BUDGET)
    prefill(model, cache, random_ids(PROMPT), new_tokens=NEW)
    report = cache.report()
    assert report.kv_bytes == LAYERS * HEADS * 40 * PAIR[codec]
    decode_step(model, cache, random_ids(1)[0])
    report = cache.report()
    assert report.allocated_bytes == LAYERS * HEADS * 41 * PAIR[codec]
    assert report.state_bytes == LAYERS * HEADS * (41 * (4 + 4) + 3 * DIM)
    assert report.traffic_bytes == report.allocated_bytes


@pytest.mark.parametrize(
    ("policy", "share"), [("expected+int4", 0.12), ("expected+int8", 0.18), ("rkv+int4", 0.13)]
)
def test_what_is_held_of_a_thousand_tokens_at_256_in_heads_of_smollm2(policy, share):
    """Nine query heads of 64 numbers; R-KV has slots for 128 tokens above the budget."""
    sizes = {"hidden_size": 72, "intermediate_size": 64, "vocab_size": 256, "head_dim": 64}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 2}
    model = kvtool.attach(LlamaForCausalLM(LlamaConfig(**sizes, **heads)).bfloat16().eval())
    held, report = most_held(model, policy, 256, 1000, 8, batch=1)
    found = forecast_of(model, kvtool.parse_policy(policy), 256, 1000, 8, batch=1)
    assert (found.storage, found.keys_values) == (held, report.allocated_bytes)
    assert held <= share * report.full_bytes


def test_what_calidrop_sets_aside_stays_as_it_is(model):
    found = {}
    for policy in ("h2o+calidrop", "h2o+calidrop+int4"):
        cache = kvtool.build_cache(model, policy, BUDGET)
        prefill(model, cache, random_ids(PROMPT), new_tokens=NEW)
        for token in random_ids(NEW, seed=1)[0]:
            decode_step(model, cache, token[None])
        found[policy] = cache.report()
    plain, coded = found.values()
    assert coded.host_bytes == plain.host_bytes > 0
    assert coded.state_bytes == plain.state_bytes + LAYERS * HEADS * 3 * DIM  # see a worked slot
    assert coded.allocated_bytes < plain.allocated_bytes


def test_a_dry_run_of_eval_tells_what_a_prompt_leaves():
    model = kvtool.attach(family_model("gemma3"))
    for arm in make_variants(["h2o+int8", "full+fp8"], ["25%", "9KiB"], baseline=False):
        cache = kvtool.build_cache(model, arm.policy, arm.budget)
        compress(model, cache, random_ids(PROMPT))
        assert bytes_held(model.config, "float32", arm, PROMPT) == cache.report().kv_bytes


def test_more_quantised_caches_fit_into_a_memory():
    """Four layers of 4096 tokens as they are stored, and one as it is seen, in bfloat16.

    A token takes 2 heads x (2 vectors of 256, 130 or 72 bytes, and a position): 21.1, 12.9 and 9.1
    million bytes, and a little for buffers that grow.
    """
    rows = []
    for policy in ("full", "full+int8", "full+int4"):
        (arm,) = make_variants([policy], [], prefill="block:128", baseline=False)
        rows.append(largest_batch(config_of(128), "bfloat16", arm, 4096, 1, 2**28))
    assert rows == [12, 20, 28]


# ---- the numbers that are promised


def config_of(dim: int) -> LlamaConfig:
    """A Llama of 4 layers and 2 KV heads in bfloat16, without weights."""
    sizes = {"hidden_size": 8 * dim, "num_attention_heads": 8, "num_key_value_heads": 2}
    return LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=512, dtype="bfloat16")


@pytest.mark.parametrize(
    ("policy", "budget", "dim", "smaller"),
    [
        ("h2o+int8", "25%", 128, 7.9),
        ("h2o+fp8", "25%", 64, 7.8),
        ("snapkv+int4", "25%", 128, 14.2),
        ("h2o+k8v4", "25%", 64, 10.0),
        ("full+int8", None, 128, 1.97),
        ("full+fp8", None, 64, 1.94),
        ("full+int4", None, 64, 3.56),
        ("full+k8v4", None, 128, 2.53),
        ("full+int(keys=4,values=8)", None, 64, 2.51),
    ],
)
def test_how_much_smaller_caches_are(policy, budget, dim, smaller):
    (arm,) = make_variants([policy], [budget] if budget else [], baseline=False)
    found = estimate_memory(config_of(dim), "bfloat16", arm, Text(16384), NOTHING)
    assert round(found.full_bytes / found.kv_bytes, 1 if budget else 2) == smaller
    held = bytes_held(config_of(dim), "bfloat16", arm, 16384)
    assert round(found.full_bytes / held, 1 if budget else 2) == smaller


def test_a_dry_run_tells_what_a_codec_saves_of_the_peak():
    """A quarter of 8192 tokens in all layers; the block beside one layer stays in bfloat16."""
    told = []
    for policy in ("h2o", "h2o+int8"):
        (arm,) = make_variants([policy], ["25%"], prefill="block:128", baseline=False)
        told.append(
            estimate_memory(config_of(128), "bfloat16", arm, Text(8192), NOTHING).peak_bytes
        )
    assert told[0] - told[1] == 4 * 2 * 2048 * 2 * (128 * 2 - 130)


@pytest.mark.parametrize(
    ("policy", "mode"), [("h2o+int8", "block:16"), ("h2o+k8v4", "full"), ("full+int4", "block:16")]
)
def test_the_bound_while_a_prompt_is_read_counts_one_layer_decoded(model, policy, mode):
    policy = kvtool.parse_policy(policy)
    budget = BUDGET if policy.takes_budget else None
    cache = kvtool.build_cache(model, policy, budget, prefill=mode)
    prefill(model, cache, random_ids(PROMPT))
    block = PROMPT if mode == "full" else 16
    kept = [budget or PROMPT] * LAYERS
    layers = layer_shapes(model.config, str(model.dtype).removeprefix("torch."))
    bound = reading_bytes(policy, layers, kept, PROMPT, block, waits=False)
    assert cache.report().peak_bytes <= bound
    joined = PROMPT if budget is None or mode == "full" else budget + block
    assert cache.report().peak_bytes >= HEADS * joined * 2 * DIM * model.dtype.itemsize


# ---- budgets and plans in bytes


@pytest.mark.parametrize(("base", "codec"), [("h2o+every(steps=7)", "int8"), ("h2o+ada", "k8v4")])
def test_bytes_are_met_to_the_slot(model, base, codec):
    cache = kvtool.build_cache(model, f"{base}+{codec}", f"{SIZE}B")
    prefill(model, cache, random_ids(600), new_tokens=NEW)
    tokens = cache.slot_layers[0].budget.max_budget
    plain = kvtool.build_cache(model, base, f"{SIZE}B")
    prefill(model, plain, random_ids(600), new_tokens=NEW)
    assert tokens > plain.slot_layers[0].budget.max_budget
    held = [bytes_of(cache)]
    for token in random_ids(NEW, seed=1)[0]:
        decode_step(model, cache, token[None])
        held.append(bytes_of(cache))
    above, _ = most_held(model, f"{base}+{codec}", tokens + 1, 600, NEW, batch=1)
    assert max(held) <= SIZE < above


def plan_of(model, policy, **target):
    shape = ModelShape.of(model.config, name="m", dtype=str(model.dtype).removeprefix("torch."))
    asked = Target(context=600, max_new_tokens=NEW, **target)
    return make_plan(shape, Uniform(), asked, policy=kvtool.parse_policy(policy)).document


def test_a_plan_in_bytes_is_obeyed(model):
    plan = plan_of(model, "h2o+int4", bytes=SIZE)
    cache = kvtool.build_cache(model, "h2o+int4", plan=plan)
    prefill(model, cache, random_ids(600 - NEW), new_tokens=NEW)
    held = [bytes_of(cache)]
    for token in random_ids(NEW, seed=1)[0]:
        decode_step(model, cache, token[None])
        held.append(bytes_of(cache))
    assert max(held) == plan.totals.bytes <= SIZE
    assert cache.report().kept_per_layer == plan.layers.tokens
    traffic = plan.totals.traffic
    assert cache.report().traffic_bytes == traffic.bytes
    plain = LAYERS * HEADS * 2 * DIM * model.dtype.itemsize
    assert traffic.share_of_full == traffic.bytes / (600 * plain)
    assert plan.totals.share_of_full == plan.totals.bytes / (600 * plain)


def test_a_plan_for_another_codec_is_looked_at_again(model):
    plan = plan_of(model, "h2o+int4", bytes=SIZE)
    for other in ("h2o", "h2o+int8", "h2o+fp8", "h2o+k8v4"):
        refused = rf"for policy `h2o\+int4`, and `{re.escape(other)}` would hold"
        with pytest.raises(UsageError, match=refused) as told:
            kvtool.build_cache(model, other, plan=plan)
        assert told.value.hint == f"make the plan anew: kvtool plan-budget .. -p '{other}'"
    plan = plan_of(model, "h2o+int8", bytes=SIZE)
    given = model.config, str(model.dtype).removeprefix("torch.")
    assert check_run(plan, kvtool.parse_policy("h2o+int8"), *given) == []
    assert check_run(plan, kvtool.parse_policy("h2o+fp8"), *given) == [
        "note: the plan's totals are those of `h2o+int8`, and this is `h2o+fp8`"
    ]
    (told,) = check_run(plan, kvtool.parse_policy("h2o+int4"), *given)
    assert f"bytes, not {plan.totals.bytes}" in told


# ---- head sizes that 4 bits cannot share scales in


def test_heads_that_a_codec_cannot_store_are_refused_before_weights():
    config = family_model("llama").config  # 16 channels
    policy = kvtool.parse_policy("h2o+int4")
    (arm,) = make_variants(["h2o+int4"], ["40"], baseline=False)
    refused = pytest.raises(UsageError, match="and a head of this model has 16")
    with refused:
        estimate_memory(config, "float32", arm, Text(90), NOTHING)
    with refused:
        check_bytes(config, "float32", [arm])
    with refused:
        make_plan(
            ModelShape.of(config, name="m"), Uniform(), Target(context=90, tokens=9), policy=policy
        )
    with refused as told:
        kvtool.plan(config, tokens=9, context=90, policy="h2o+int4")
    assert told.value.hint == "take int8 or fp8, which take any head size"


def test_heads_that_a_codec_cannot_store_are_refused_by_a_cache():
    with pytest.raises(UsageError, match="and a head of this model has 16"):
        kvtool.build_cache(family_model("llama"), "full+int4")
    kvtool.build_cache(family_model("llama"), "full+int8")


def test_a_value_may_be_what_cannot_be_stored():
    config = family_model("deepseek_v3").config
    config.kv_lora_rank = 32  # beside a rotated key of 8
    with pytest.raises(UsageError, match="and a head of this model has 8"):
        kvtool.plan(config, tokens=9, context=90, policy="h2o+int4")


def test_each_side_is_asked_for_its_own_size():
    layer = LayerShape(kv_heads=2, heads=2, key_dim=48, value_dim=64, itemsize=2)
    check_dims(kvtool.parse_policy("full+k8v4"), [layer, None])
    with pytest.raises(UsageError, match="and a head of this model has 48"):
        check_dims(kvtool.parse_policy("full+int(keys=4,values=8)"), [layer, None])
    assert stored_bytes(layer, kvtool.parse_policy("full+k8v4").codec) == 48 + 2 + 32 + 4


def test_a_device_that_cannot_make_codes_is_refused_before_a_cache(monkeypatch):
    def missing(numbers):
        raise AttributeError("module 'torch' has no attribute 'float8_e4m3fn'")

    monkeypatch.setattr("kvtool.policies.codec.fp8.fp8_codes", missing)
    with pytest.raises(UsageError, match="needs float8_e4m3fn, which torch"):
        kvtool.build_cache(family_model("llama"), "h2o+fp8", 40)
