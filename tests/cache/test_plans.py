"""Caches built by a plan: what is held equals what was planned, at batch 1 and 2."""

import json

import pytest
import torch

import kvtool
from kvtool.errors import UsageError
from kvtool.generation import decode_step, prefill
from kvtool.models.load import load
from tests.models_for_tests import peaky_model

pytestmark = pytest.mark.few(2)  # every policy goes through tests/contract

CONTEXT = 200


@pytest.fixture(scope="module")
def model():
    loaded = load()
    return kvtool.attach(loaded.model)


@pytest.fixture
def plan(kvtool_command):
    def make(*arguments) -> dict:
        return json.loads(kvtool_command("plan-budget", *arguments, "-f", "json", "-q"))

    return make


@pytest.fixture
def kvtool_command(capsys):
    from kvtool.cli.main import main

    def run(*arguments) -> str:
        capsys.readouterr()
        assert main(arguments) == 0
        return capsys.readouterr().out

    return run


def ids(n, seed=0):
    return torch.randint(5, 400, (1, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("allocator", "policy"),
    [
        ("pyramid", "adakv(window=4)"),
        ("ada(share=0.5)", "h2o+caote"),
    ],
)
def test_heads_that_compete_hold_the_planned_bytes_together(model, plan, allocator, policy):
    document = plan("-b", "40", "--context", str(CONTEXT), "--allocator", allocator)
    cache = kvtool.build_cache(model, policy, plan=document)
    both = torch.cat([ids(CONTEXT), ids(CONTEXT, seed=1)])
    mask = torch.ones_like(both)
    mask[1, :30] = 0
    prefill(model, cache, both, mask)
    assert cache.report().kv_bytes == 2 * document["totals"]["bytes"]
    for layer, tokens in enumerate(document["layers"]["tokens"]):
        counts = (cache.kept_positions(layer) >= 0).sum(-1)
        assert counts.sum(-1).tolist() == [tokens * counts.shape[1]] * 2
    assert any(
        len(set(row)) > 1
        for layer in range(4)
        for row in (cache.kept_positions(layer) >= 0).sum(-1).tolist()
    )


def test_one_keep_set_for_all_layers_takes_only_a_plan_of_equal_layers(model, plan):
    document = plan("--ratio", "20%", "--context", str(CONTEXT), "--allocator", "uniform")
    cache = kvtool.build_cache(model, "sirllm", plan=document)
    prefill(model, cache, ids(CONTEXT))
    assert cache.report().kept_per_layer == [40] * 4
    steep = plan("-b", "40", "--context", str(CONTEXT), "--allocator", "pyramid")
    with pytest.raises(UsageError, match="keeps the same tokens in all layers, and the plan gives"):
        kvtool.build_cache(model, "sirllm", plan=steep)


@pytest.mark.parametrize("allocator", ["pyramid"])
def test_padded_rows_hold_what_each_holds_alone(model, plan, allocator):
    document = plan("--ratio", "25%", "--context", str(CONTEXT), "--allocator", allocator)
    rows = [ids(CONTEXT)[0], ids(120, seed=1)[0]]
    both = torch.zeros(2, CONTEXT, dtype=torch.long)
    mask = torch.zeros_like(both)
    for i, row in enumerate(rows):
        both[i, CONTEXT - len(row) :], mask[i, CONTEXT - len(row) :] = row, 1
    cache = kvtool.build_cache(model, "h2o", plan=document)
    prefill(model, cache, both, mask)
    assert cache.report().kv_bytes == (50 + 30) * 4 * 2 * 32 * 2 * 4
    for i, row in enumerate(rows):
        alone = kvtool.build_cache(model, "h2o", plan=document)
        prefill(model, alone, row[None])
        assert sum(alone.report().kept_per_layer) == len(row) // 4 * 4
        for layer in range(4):
            kept = alone.kept_positions(layer)[0]
            assert torch.equal(cache.kept_positions(layer)[i][:, : kept.shape[1]], kept)


def test_a_plan_replaces_the_policys_own_allocator(model, plan):
    document = plan("-b", "40", "--context", str(CONTEXT), "--allocator", "uniform")
    cache = kvtool.build_cache(model, "snapkv(window=4)+pyramid", plan=document)
    prefill(model, cache, ids(CONTEXT))
    assert cache.report().kept_per_layer == [40] * 4


def test_a_plan_in_bytes_holds_its_bytes(model, plan):
    arguments = ("--context", str(CONTEXT), "--allocator", "pyramid", "-p", "h2o")
    document = plan("--bytes", "100KiB", *arguments)
    cache = kvtool.build_cache(model, "h2o", plan=document)
    prefill(model, cache, ids(CONTEXT))
    report = cache.report()
    assert report.kept_per_layer == document["layers"]["tokens"]
    held = report.allocated_bytes + report.state_bytes
    assert held == document["totals"]["bytes"] == document["totals"]["storage"]["bytes"]
    assert 100 * 1024 - 544 < held <= 100 * 1024  # a slot is 512, two positions and two sums


def test_bytes_that_another_policy_or_dtype_would_exceed_are_refused(model, plan):
    document = plan("--bytes", "100KiB", "--context", str(CONTEXT), "-p", "tova")
    with pytest.raises(UsageError, match="are for policy `tova`, and `roco` would hold") as told:
        kvtool.build_cache(model, "roco", plan=document)
    assert told.value.hint == "make the plan anew: kvtool plan-budget .. -p 'roco'"
    kvtool.build_cache(model, "streaming", plan=document)  # holds as much
    halves = plan("--bytes", "100KiB", "--context", str(CONTEXT), "-p", "h2o", "--dtype", "float16")
    with pytest.raises(UsageError, match="are for float16, and in float32 the run would") as told:
        kvtool.build_cache(model, "h2o", plan=halves)
    assert "--dtype float16, or make the plan anew" in told.value.hint


def test_a_short_prompt_fits_and_may_grow_to_the_plan(model, plan):
    document = plan("-b", "40", "--context", str(CONTEXT), "--allocator", "pyramid")
    cache = kvtool.build_cache(model, "h2o", plan=document)
    prefill(model, cache, ids(10))
    assert cache.report().kept_per_layer == [10] * 4
    prefill(model, cache, ids(55, seed=1))
    for token in range(10, 30):
        decode_step(model, cache, torch.tensor([token]))
    assert sum(cache.report().kept_per_layer) == 160


def test_plans_come_from_files_and_go_into_saved_caches(model, plan, tmp_path):
    document = plan("--ratio", "25%", "--context", str(CONTEXT), "--allocator", "pyramid")
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    cache = kvtool.build_cache(model, "h2o", plan=path)
    prefill(model, cache, ids(CONTEXT))
    kvtool.save_cache(cache, tmp_path / "a.st", model=model)
    again = kvtool.load_cache(tmp_path / "a.st", model)
    assert again.plan == cache.plan
    for each in (cache, again):
        prefill(model, each, ids(60, seed=3))
    assert again.report().kept_per_layer == cache.report().kept_per_layer
    assert sum(cache.report().kept_per_layer) == 260 // 4 * 4


def test_what_does_not_fit_is_refused(model, plan, tmp_path):
    document = plan("-b", "40", "--context", str(CONTEXT), "--allocator", "pyramid")
    with pytest.raises(UsageError, match="a plan brings its own budget"):
        kvtool.build_cache(model, "h2o", 40, plan=document)
    with pytest.raises(UsageError, match="made for model `reference`"):
        kvtool.build_cache(kvtool.attach(peaky_model("llama")), "h2o", plan=document)
    with pytest.raises(UsageError, match="No such file"):
        kvtool.build_cache(model, "h2o", plan=tmp_path / "no.yaml")
    with pytest.raises(UsageError, match="kind"):
        kvtool.build_cache(model, "h2o", plan={"kind": "recipe"})
    cache = kvtool.build_cache(model, "streaming(sinks=20)", plan=document)
    with pytest.raises(UsageError, match="is not above sinks 20"):
        prefill(model, cache, ids(CONTEXT))
