"""RocketKV and RocketKV-MT on models: both stages against slow twins, turn by turn."""

from __future__ import annotations

from dataclasses import replace

import pytest

import kvtool
from kvtool.cache.features.sparse_index import SparseIndex
from kvtool.cache.whole.report import bytes_read
from kvtool.documents.memory import ModelShape
from kvtool.documents.plan import PlanDocument, Target
from kvtool.generation import decode_step, prefill
from kvtool.model_shape import layer_shapes
from kvtool.planning.budgets import even_budgets, forecast_plan
from kvtool.planning.bytes import Text
from kvtool.planning.make_plan import make_plan
from kvtool.planning.rocketkv_stages import plan_rocketkv
from kvtool.policies.allocate.uniform import Uniform
from kvtool.policies.read.hsa import HSA
from tests.cache.test_readers import Run, decoded, follow, model, ragged  # noqa: F401
from tests.models_for_tests import peaky_model, prompt, random_ids
from tests.reference import readers
from tests.reference.policies import build
from tests.reference.reading import ReadingOracle

pytestmark = pytest.mark.few(2)  # every policy goes through tests/contract

LENGTH, BUDGET, WINDOW = 90, 24, 8


def oracle_of(model, forget=True, split=None):  # noqa: F811
    """The twin: a slow SnapKV at the end of every prompt, then a slow HSA."""

    def plan(seen, window=0):
        dim = model.config.head_dim
        return plan_rocketkv(seen, BUDGET, dim, window=window, split=split, strict=True)

    def make_policy(seen):
        kept = seen if seen <= BUDGET else plan(seen, WINDOW).prompt_tokens
        return build("snapkv", kept, window=WINDOW, kernel=63)

    def make_reader(tokens, keys, seen):
        sizes = plan(seen)
        return readers.HSA(sizes.page_size, sizes.head_dims, sizes.top_k, BUDGET)

    return ReadingOracle(model, make_reader, make_policy, forget)


def turns(model, policy, forget, mode, split=None, seeds=(5,)):  # noqa: F811
    oracle = oracle_of(model, forget, split)
    run = Run(model, policy, BUDGET, prompt(LENGTH), mode)
    kvtool.detach(model)
    logits = oracle.turn(prompt(LENGTH))
    kvtool.attach(model)
    yield run, oracle
    follow(run, oracle, logits, 4)
    yield run, oracle
    for seed in seeds:
        turn = prompt(20, seed=seed)
        kvtool.detach(model)
        logits = oracle.turn(turn)
        kvtool.attach(model)
        run.turn(turn)
        yield run, oracle
        follow(run, oracle, logits, 2)
        yield run, oracle


def kept(run):
    layers = range(run.model.config.num_hidden_layers)
    return {layer: run.cache.kept_positions(layer)[0].tolist() for layer in layers}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "mode"), [("llama", "block:85"), ("qwen3", "full"), ("llama", "block:7")]
)
def test_both_stages_equal_their_twins(model, mode):  # noqa: F811
    """However the prompt is computed, it is cut once, by its last queries."""
    for run, oracle in turns(model, f"rocketkv(window={WINDOW})", True, mode):
        assert kept(run) == oracle.stored


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama"])
def test_a_split_of_ones_own(model):  # noqa: F811
    policy = f"rocketkv(window={WINDOW},split=0.5)"
    for run, oracle in turns(model, policy, True, "full", split=0.5):
        assert kept(run) == oracle.stored
    assert str(kvtool.parse_policy(policy)) == policy


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "mode"), [("llama", "block:16"), ("qwen3", "full")])
def test_multi_turn_keeps_all_and_chooses_anew(model, mode):  # noqa: F811
    seen = []
    for run, oracle in turns(model, f"rocketkv-mt(window={WINDOW})", False, mode):
        assert kept(run) == oracle.stored
        for index, layer in enumerate(run.cache.layers):
            reading = SparseIndex.of(layer).entries[0]
            chosen = reading.index[0, :, : reading.tokens.most].tolist()
            assert chosen == oracle.kept[index]
        seen.append(chosen)
    assert set(seen[2][0]) - set(seen[0][0]) - set(range(LENGTH, 200)), "no token came back"


def test_sizes_storage_and_traffic_are_those_of_the_plan():
    lm = kvtool.attach(peaky_model("llama"))
    ids, new, plan = random_ids(300), random_ids(7, seed=1).T, plan_rocketkv(300, 32, 16, window=4)
    cut = kvtool.build_cache(lm, "rocketkv(window=4)", 32)
    decoded(lm, cut, ids, new)
    reading = SparseIndex.of(cut.layers[0]).entries[0]
    assert reading.readers[0] == HSA(plan.page_size, plan.head_dims, plan.top_k)
    report = cut.report()
    assert report.kept_per_layer == [plan.prompt_tokens + 7] * 2
    pages = -(-report.kept_per_layer[0] // plan.page_size)
    assert report.traffic_pairs == pages * plan.head_dims / (2 * 16) + plan.top_k
    assert abs(report.traffic_pairs - 32) < 2
    whole = kvtool.build_cache(lm, "rocketkv-mt(window=4)", 32)
    decoded(lm, whole, ids, new)
    assert whole.report().kept_per_layer == [307] * 2
    assert whole.report().traffic_pairs == report.traffic_pairs


def obeyed(document, length, policy="rocketkv(window=4)", new=3):
    """A cache that follows a plan, after a prompt and some tokens; and its readers by layer."""
    lm = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(lm, policy, plan=document)
    prefill(lm, cache, random_ids(length), new_tokens=new)
    for token in random_ids(new, seed=1)[0]:
        decode_step(lm, cache, token[None])
    return cache, [SparseIndex.of(layer).entries[0].readers[0] for layer in cache.layers]


def planned(policy="rocketkv(window=4)", tokens=None, target_tokens=None, **target):
    """A plan for a small model; `tokens` in place of those that it gives to its layers."""
    shape = ModelShape.of(peaky_model("llama").config, name="peaky", dtype="float32")
    given = {"context": 320, "max_new_tokens": 20, "tokens": target_tokens} | target
    document = make_plan(
        shape, Uniform(), Target(**given), policy=kvtool.parse_policy(policy)
    ).document
    if tokens is None:
        return document
    layers = document.layers.model_copy(
        update={"tokens": tokens, "fractions": None, "min_tokens": 1}
    )
    return document.model_copy(update={"layers": layers, "totals": None})


def edited(document, leave_out=(), **changes):
    data = document.to_data()
    data["rocketkv"] = {k: v for k, v in data["rocketkv"].items() if k not in leave_out} | changes
    return PlanDocument(**data)


@pytest.mark.parametrize("length", [200, 310])
def test_a_plan_is_obeyed_as_it_stands_whatever_the_prompt(length):
    document = planned(target_tokens=64)
    section = document.rocketkv
    cache, readers_ = obeyed(document, length)
    assert cache.report().kept_per_layer == [section.prompt_tokens + 3] * 2
    assert readers_ == [HSA(section.page_size, section.head_dims, section.top_k)] * 2
    assert SparseIndex.of(cache.layers[0]).entries[0].budget.most == section.token_budget == 64


@pytest.mark.parametrize("policy", ["rocketkv(window=4)", "hsa"])
def test_every_number_of_the_section_changes_the_run(policy):
    document = planned(policy, target_tokens=64)
    changed = edited(document, page_size=5, head_dims=7, top_k=11)
    _, found = obeyed(changed, 300, policy)
    assert found == [HSA(5, 7, 11)] * 2
    if policy == "hsa":
        return
    stage1 = edited(document, ("split_factor", "prompt_tokens"), stage1_tokens=150)
    by_split = edited(document, ("stage1_tokens", "prompt_tokens"), split_factor=0.5)
    for plan, kept in ((stage1, 130), (by_split, int(320 / 5**0.5) - 20)):
        cache, _ = obeyed(plan, 300, policy)
        reading = SparseIndex.of(cache.layers[0]).entries[0]
        assert reading.prompts == [kept]


def test_unequal_fractions_share_stage_1_by_largest_remainder():
    """C = 163 and 2 layers: 326 tokens by 50 : 14 = 254.69, 71.31 -> 255, 71; 20 are to come."""
    document = planned(tokens=[50, 14], target_tokens=32)
    document = edited(document, ("split_factor", "prompt_tokens"), stage1_tokens=163)
    cache, _ = obeyed(document, 300)
    assert cache.report().kept_per_layer == [235 + 3, 51 + 3]
    flat = edited(
        planned(tokens=[60, 4], target_tokens=32),
        ("split_factor", "prompt_tokens"),
        stage1_tokens=60,
    )
    cache, _ = obeyed(flat, 300)
    assert cache.report().kept_per_layer == [120 - 24 - 20 + 3, 4 + 3]  # the window at least


def test_unequal_fractions_share_what_hsa_reads():
    """t = 32 and 16 tokens attended in the mean of 2 layers: 64 and 32 by 50 : 14."""
    document = planned("hsa", tokens=[50, 14], target_tokens=32)
    section = document.rocketkv
    cache, found = obeyed(document, 300, "hsa")
    assert found == [HSA(section.page_size, section.head_dims, k) for k in (25, 7)]
    assert [SparseIndex.of(layer).entries[0].budget.most for layer in cache.layers] == [50, 14]
    read = [bytes_read(layer) for layer in cache.layers]
    assert read[0] - read[1] == 2 * (25 - 7) * (16 + 16) * 4  # KV heads, keys and values
    forecast = forecast_plan(
        document, kvtool.parse_policy("hsa"), Text(300, 3), document.model.layer_shapes()
    )
    assert forecast.traffic == cache.report().traffic_bytes == sum(read)


def test_a_share_scales_the_counts_and_nothing_else():
    document = planned(context=400, max_new_tokens=0, ratio=0.2)
    section = document.rocketkv
    cache, found = obeyed(document, 300)
    kept = section.prompt_tokens * 300 // 400
    assert cache.report().kept_per_layer == [kept + 3] * 2
    expected = HSA(section.page_size, section.head_dims, section.top_k * 300 // 400)
    assert found == [expected] * 2
    assert (
        SparseIndex.of(cache.layers[0]).entries[0].budget.most == section.token_budget * 300 // 400
    )


def test_sizes_of_a_policy_that_are_not_the_plans_are_refused():
    lm = kvtool.attach(peaky_model("llama"))
    document = planned(target_tokens=64)
    with pytest.raises(kvtool.UsageError, match=r"has split 0.5, and the plan"):
        kvtool.build_cache(lm, "rocketkv(window=4,split=0.5)", plan=document)
    with pytest.raises(kvtool.UsageError, match="has page 9, and the plan"):
        kvtool.build_cache(lm, "hsa(page=9)", plan=document)


def test_refusals():
    lm = kvtool.attach(peaky_model("llama"))
    with pytest.raises(kvtool.UsageError, match="rocketkv needs a budget of 16 or more, got 15"):
        kvtool.build_cache(lm, "rocketkv", 15)
    cache = kvtool.build_cache(lm, "rocketkv", 16)
    with pytest.raises(kvtool.UsageError, match="keeps 25 tokens of the prompt"):
        prefill(lm, cache, random_ids(30))
    assert cache.get_seq_length() == 0
    for text in ("rocketkv+caote", "rocketkv-mt+pyramid"):
        with pytest.raises(kvtool.UsageError, match="has no part in it"):
            kvtool.parse_policy(text)
    with pytest.raises(kvtool.UsageError, match=r"between 0 and 1, got 1\.5"):
        kvtool.parse_policy("rocketkv(split=1.5)")
    score = kvtool.parse_policy("rocketkv").score
    quest = kvtool.parse_policy("quest(k=3)").read
    with pytest.raises(kvtool.UsageError, match="`rocketkv` comes with a reader of its own"):
        replace(kvtool.parse_policy("rocketkv"), read=quest)
    assert score.reader == HSA()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("policy", "length", "new"),
    [
        ("rocketkv", 40, 9),
        ("rocketkv", 20, 30),
        ("rocketkv(split=0.5)", 33, 16),
        ("rocketkv-mt", 40, 9),
    ],
)
def test_a_prompt_of_no_more_tokens_than_a_step_reads_is_kept_whole(length, new, policy):
    """However many tokens stage 1 would leave; no step reads more pairs than the budget has."""
    lm = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(lm, policy, 40)
    logits = prefill(lm, cache, random_ids(length), new_tokens=new)
    for _ in range(new - 1):
        logits = decode_step(lm, cache, logits.argmax(-1))
    everything = list(range(length + new - 1))
    for layer in range(2):
        assert cache.kept_positions(layer)[0].tolist() == [everything] * 2
    assert cache.report().traffic_pairs <= 40
    options = {"max_new_tokens": new, "window": 0, "split": 0.0, "strict": True}
    whole = plan_rocketkv(length + new, 40, 16, **options)
    read = cache.budgets.traffic.reader(cache.first_layer, 0, length)[0]
    sizes = (whole.page_size, whole.head_dims, whole.top_k)
    assert (read.page, read.k1, read.k) == sizes
    layer = layer_shapes(lm.config)[0]
    (part,) = even_budgets(cache.policy, 40, [layer], Text(length, new, 1, 96))
    assert (part.tokens, part.reading.reader.k1) == (length, read.k1)
