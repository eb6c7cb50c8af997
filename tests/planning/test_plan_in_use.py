"""An edited decision of a plan changes the run or is refused; what follows from them is a note."""

import itertools
from types import SimpleNamespace

import pytest
import torch

import kvtool
from kvtool.cli.main import main
from kvtool.documents.memory import ModelShape
from kvtool.documents.plan import PlanDocument
from kvtool.errors import KvtoolError, UsageError
from kvtool.generation import decode_step, prefill
from kvtool.planning.plan_in_use import check_free
from tests.documents.keys import edited, find, others, ways
from tests.models_for_tests import family_model, peaky_model, random_ids

CONTEXT, NEW, SHORT = 220, 4, 100
COMMON = {"context": CONTEXT, "max_new_tokens": NEW}
NOTES = {  # keys that a run does not obey: who runs it, and numbers that follow from the others
    ("policy",),
    *[("model", name) for name in ("id", "revision", "dtype", "vocabulary", "trained_length")],
    ("model", "kv_bytes_per_token"),
    ("layers", "fractions", "*"),
    *[("totals", name) for name in ("tokens", "bytes", "share_of_full", "reading")],
    *[
        ("totals", name, what)
        for name in ("storage", "traffic")
        for what in ("bytes", "share_of_full")
    ],
    *[("rocketkv", name) for name in ("dense", "compression_ratio", "prompt_tokens")],
    *[("rocketkv", name, what) for name in ("storage", "traffic") for what in ("exact", "paper")],
}
SOMETIMES = {  # the least of a layer, `ada`, and what a target is for do not bind in every plan
    *[("layers", name) for name in ("min_tokens", "allocator")],
    ("layers", "tokens", "*"),  # of a layer with a window
    *[("target", name) for name in ("tokens", "bytes", "context", "max_new_tokens", "batch")],
}
MORE = {  # values that only make sense at one key
    ("model", "dtype"): ["bfloat16", "float16"],
    ("model", "layer_types", "*"): ["sliding_attention", "full_attention", "linear_attention"],
    ("layers", "allocator"): ["pyramid", "uniform", "ada", "none"],
    ("policy",): ["tova", "snapkv(window=4)"],
    ("target", "ratio"): ["12%"],
    ("schema_version",): [2],
    ("kind",): ["profile"],
}


def profile_of(model, heads=None):
    shape = ModelShape.of(model.config, name="m", dtype="float32")
    numbers = [1.0, 9.0, 40.0, 90.0][: shape.layers]
    text = {"source": "builtin", "samples": 1, "tokens": 150, "seed": 0, "fingerprint": "0"}
    return {
        "kind": "profile",
        "schema_version": 1,
        "model": shape.model_dump(),
        "data": text,
        "metrics": {"f_variance": numbers} if heads is None else {"answer_loss": losses_of(heads)},
    }


def losses_of(heads):
    """Losses of two samples that agree, of each KV head at 12 and at 40 tokens."""
    layers = [[max(column) for column in zip(*own, strict=True)] for own in heads]

    def said(rows):
        none = [[0.0 * number for number in row] for row in rows] if rows is layers else heads
        return {"losses": rows, "standard_errors": none, "by_sample": [rows] * 2}

    sizes = {"policy": "h2o", "budgets": [12, 40]}
    return sizes | said(layers) | {"heads": said(heads)}


@pytest.fixture(scope="module")
def plans():
    """Plans of every sort: model, policy that runs, document."""
    model, window, latent = (
        peaky_model("llama"),
        family_model("gemma2"),
        family_model("deepseek_v3"),
    )
    for each in (model, window, latent):
        kvtool.attach(each)
    rocket = "rocketkv(window=4)"

    def made(of, policy, source=None, **target):
        source = of.config if source is None else source
        found = kvtool.plan(source, policy=policy, dtype="float32", **COMMON | target)
        data = found.to_data()
        return SimpleNamespace(model=of, policy=policy, data=data, ran=run(of, policy, data))

    return {
        "tokens": made(model, "h2o", tokens=30),
        "pyramid": made(model, "h2o", tokens=30, allocator="pyramid"),
        "ratio": made(model, "tova", ratio="20%", allocator="pyramid", min_tokens=20),
        "bytes": made(model, "h2o", bytes="40KiB"),
        "unnamed": made(model, None, tokens=30),
        "profile": made(model, "h2o", profile_of(model), tokens=30),
        "heads": made(
            model,
            "h2o",
            profile_of(model, heads=[[[0.1, 0.0], [4.0, 2.0]], [[1.0, 0.1], [0.2, 0.1]]]),
            tokens=30,
            allocator="optimal(heads=true)",
        ),
        "stages": made(model, rocket, tokens=40),
        "stages of a share": made(model, rocket, ratio="20%", batch=2),
        "dense": made(model, rocket, tokens=CONTEXT + 40),
        "windows": made(window, "h2o", tokens=30),
        "latents": made(latent, "h2o", tokens=30),
    }


def run(model, policy, data):
    """What a run by a plan holds, reads and computes, on a long and on a short prompt."""
    found = []
    for length in (CONTEXT - NEW, SHORT):
        cache = kvtool.build_cache(model, policy or "h2o", plan=data)
        with torch.no_grad():
            prefill(model, cache, random_ids(length), new_tokens=NEW)
            logits = [decode_step(model, cache, torch.tensor([token])) for token in (5, 6)]
        report = cache.report()
        held = report.kept_per_layer, report.allocated_bytes, report.traffic_bytes
        found.append((held, [each.tolist() for each in logits]))
    return found


LISTED = ("device", "ways", "ways_source", "predicted_loss")  # for the reader; no run reads them
WAYS = [way for way in ways(PlanDocument) if way[0] not in LISTED]


def test_the_walk_finds_every_key(plans):
    assert len(WAYS) == len(set(WAYS)) > 40
    never = {way for way in WAYS if all(find(p.data, way) is None for p in plans.values())}
    # a configuration of no checkpoint has no revision; `kvzip` alone has the other
    assert never == {("model", "revision"), ("totals", "reading")}


def test_a_plan_of_heads_is_run_head_by_head(plans):
    plan = plans["heads"]
    heads, tokens = plan.data["layers"]["heads"], plan.data["layers"]["tokens"]
    assert any(len(set(own)) > 1 for own in heads)
    assert [sum(own) for own in heads] == [2 * mean for mean in tokens]
    cache = kvtool.build_cache(plan.model, "h2o", plan=plan.data)
    prefill(plan.model, cache, random_ids(CONTEXT - NEW), new_tokens=NEW)
    kept = [(cache.kept_positions(i) >= 0).sum(-1)[0].tolist() for i in range(len(heads))]
    assert kept == heads
    for token in range(5, 5 + NEW):
        decode_step(plan.model, cache, torch.tensor([token]))
    report = cache.report()
    held = report.allocated_bytes + report.state_bytes
    assert held == plan.data["totals"]["bytes"] == plan.data["totals"]["storage"]["bytes"]


def by_section(ways):
    """Keys by the section of the plan that they are in."""
    found = {}
    for way in ways:
        found.setdefault(way[0], []).append(way)
    return found


EDITED = by_section(way for way in WAYS if way not in NOTES)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("section", EDITED)
def test_a_decision_changes_the_run_or_is_refused(section, every, plans):
    for way in EDITED[section]:
        edits, ignored = edit_key(way, every, plans)
        assert edits
        assert ignored == [] or way in SOMETIMES, way


@pytest.mark.parametrize("way", sorted(NOTES - {("model", "revision"), ("totals", "reading")}))
def test_a_note_may_be_edited(way, plans):
    edits, ignored = edit_key(way, False, plans)
    assert edits == len(ignored) > 0


def edit_key(way, every, plans):
    """Put other values at a key of each plan: how many, and those that changed nothing."""
    edits, ignored = 0, []
    for name, plan in plans.items():
        value = find(plan.data, way)
        if value is None or (name == "dense" and way[0] == "rocketkv" and way not in NOTES):
            continue  # where everything is read, no stage binds
        if way[0] == "rocketkv" and not str(plan.policy).startswith("rocketkv"):
            continue  # read by policies that use its stages
        found = [*MORE.get(way, []), *others(value)]
        for other in found if every else found[:1]:
            if other == value:
                continue
            edits += 1
            try:
                ran = run(plan.model, plan.policy, edited(plan.data, way, other))
            except KvtoolError:
                continue
            if ran == plan.ran:
                ignored.append((name, other))
    return edits, ignored


UNTOUCHED = {  # without `totals`, tokens are used unchanged, whatever the request was
    *[("target", name) for name in ("tokens", "bytes", "batch", "context", "max_new_tokens")],
    *[("layers", name) for name in ("allocator", "min_tokens")],
    ("layers", "fractions", "*"),
}


@pytest.mark.parametrize("section", EDITED)
def test_without_totals_only_the_request_and_the_shares_are_not_read(section, plans):
    for way, name in itertools.product(EDITED[section], ("tokens", "stages")):
        plan = plans[name]
        data = {key: part for key, part in plan.data.items() if key != "totals"}
        value = find(data, way)
        if value is None or (way[0] == "rocketkv" and plan.policy == "h2o"):
            continue
        try:
            ran = run(plan.model, plan.policy, edited(data, way, others(value)[0]))
        except KvtoolError:
            continue
        assert ran != plan.ran or way in UNTOUCHED, way


@pytest.mark.parametrize(
    ("name", "way", "value", "told"),
    [
        ("tokens", ("model", "kv_heads"), 4, "`model.kv_heads` is 4, and the model's config"),
        ("tokens", ("target", "tokens"), 31, "the target is 31 in each of 2"),
        ("heads", ("model", "layer_types", "*"), "sliding_attention", "`layers.heads.0`: a layer"),
        ("stages", ("rocketkv", "split_factor"), 0.9, "does not agree with `split_factor`"),
        ("stages", ("rocketkv", "head_dims"), 999, "is more than the"),
        ("bytes", ("target", "bytes"), 20000, "the plan's 20000B are for other tokens and stages"),
    ],
)
def test_a_decision_out_of_range_is_refused(name, way, value, told, plans):
    data, policy = edited(plans[name].data, way, value), plans[name].policy
    with pytest.raises(KvtoolError) as error:
        kvtool.build_cache(plans[name].model, policy, plan=data)
    assert told in str(error.value) or told in error.value.report()


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_commands_refuse_a_contradiction_before_the_weights_load(command, capsys, tmp_path):
    found = kvtool.plan(policy="h2o", tokens=30, context=220)
    path = tmp_path / "plan.yaml"
    path.write_text(found.to_yaml().replace("kv_heads: 2", "kv_heads: 4"))
    asked = ["--prompt", "x"] if command == "generate" else ["-t", "niah", "--lengths", "256"]
    assert main([command, str(path), *asked, "--dry-run"]) == 2
    assert "the plan's `model.kv_heads` is 4" in capsys.readouterr().err


# ---- a plan for more memory than is free

GIB = 2**30
PLAN = SimpleNamespace(device=SimpleNamespace(memory=16 * GIB))


def test_it_is_said_with_both_numbers():
    told = "the plan is for a memory of 16.0 GiB, and 8.0 GiB are free on cuda"
    assert check_free(PLAN, "cuda", 8 * GIB, strict=False) == f"warning: {told}"
    with pytest.raises(UsageError, match=told):
        check_free(PLAN, "cuda", 8 * GIB, strict=True)


@pytest.mark.parametrize("free", [None, 15 * GIB, 16 * GIB])
def test_what_a_device_always_takes_is_no_reason(free):
    assert check_free(PLAN, "cuda", free, strict=True) is None


def test_a_plan_for_no_device_runs_anywhere():
    assert check_free(SimpleNamespace(device=None), "cpu", 1, strict=True) is None
