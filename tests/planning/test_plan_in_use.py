"""Every key of a plan changes the run or is refused when it is edited; no key is ignored."""

import itertools
from types import SimpleNamespace

import pytest
import torch

import kvtool
from kvtool.cli.main import main
from kvtool.documents.memory import ModelShape
from kvtool.documents.plan import PlanDocument
from kvtool.errors import KvtoolError
from kvtool.generation import decode_step, prefill
from tests.documents.keys import edited, find, others, ways
from tests.models_for_tests import family_model, peaky_model, random_ids

CONTEXT, NEW, SHORT = 220, 4, 100
COMMON = {"context": CONTEXT, "max_new_tokens": NEW}
NOTES = {  # keys that a run does not read, and why
    ("model", "id"): "which model runs: commands load it, and Python has loaded one already",
    ("model", "revision"): "the same",
    ("policy",): "which policy runs: commands take it, and Python names one itself",
}
SAME_SPLIT = {  # allocators that may replace another one: of plan, and name
    **dict.fromkeys(
        [
            (plan, name)
            for plan in ("profile", "heads")
            for name in ("d2ox", "pyramid", "uniform", "ada", "none")
        ],
        "a profile split the tokens, and the plan does not hold the profile",
    ),
    ("stages", "ada"): "all KV heads keep alike under a budget of what is read",
    ("stages of a share", "ada"): "the same",
    ("latents", "ada"): "there is one head, which `ada` splits over",
    ("dense", "ada"): "every layer and head keeps the whole prompt",
    ("dense", "pyramid"): "the same",
}
MORE = {  # values that only make sense at one key
    ("model", "dtype"): ["bfloat16", "float16", "int3"],
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


def test_what_reading_takes_is_refused_where_it_was_edited(plans):
    model = plans["tokens"].model
    data = kvtool.plan(model.config, policy="kvzip", dtype="float32", tokens=60, **COMMON).to_data()
    kvtool.build_cache(model, "kvzip", plan=data)
    way = ("totals", "reading")
    with pytest.raises(KvtoolError, match=r"`totals.reading` is \d+, and .* make it \d+"):
        kvtool.build_cache(model, "kvzip", plan=edited(data, way, find(data, way) + 1))


def by_section(ways):
    """Keys by the section of the plan that they are in."""
    found = {}
    for way in ways:
        found.setdefault(way[0], []).append(way)
    return found


EDITED = by_section(way for way in WAYS if way not in NOTES and way != ("totals", "reading"))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("section", EDITED)
def test_a_key_changes_the_run_or_is_refused(section, every, plans):
    for way in EDITED[section]:
        edits, ignored = edit_key(way, every, plans)
        # the least of a layer, and bytes too few for another token, do not bind in every plan
        assert edits > len(ignored) or not every, way
        if way not in {("layers", "min_tokens"), ("target", "bytes")}:
            assert ignored == [], way


def edit_key(way, every, plans):
    """Put other values at a key of each plan: how many, and those that changed nothing."""
    edits, ignored = 0, []
    for name, plan in plans.items():
        value = find(plan.data, way)
        if value is None and way != ("model", "revision"):
            continue
        if way[0] == "rocketkv" and not str(plan.policy).startswith("rocketkv"):
            continue  # read by policies that use its stages
        found = [*MORE.get(way, []), *others(value)]
        for other in found if every else found[:1]:
            if other == value or (way == ("layers", "allocator") and (name, other) in SAME_SPLIT):
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


@pytest.mark.parametrize("section", [name for name in EDITED if name != "totals"])
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
        ("tokens", ("totals", "bytes"), 5, "`totals.bytes` is 5, and `layers.tokens` and policy"),
        ("tokens", ("model", "kv_heads"), 4, "`model.kv_heads` is 4, and the model's config"),
        ("stages", ("rocketkv", "dense"), True, "`rocketkv.dense` is true, and `context` 220 and"),
        ("dense", ("rocketkv", "top_k"), 9, "`rocketkv.top_k` is 9, and `target`, under which"),
        ("windows", ("layers", "tokens", "*"), 9, "`layers.tokens.0` is 9, and a layer of kind"),
        ("bytes", ("target", "bytes"), 90000, "`target.bytes` is 90000, which leaves room"),
        ("pyramid", ("layers", "allocator"), "uniform", "`layers.tokens.0` is 51, and allocator"),
    ],
)
def test_a_contradiction_is_told_with_both_numbers(name, way, value, told, plans):
    data = edited(plans[name].data, way, value)
    if way == ("layers", "tokens", "*"):
        data.pop("totals")
        data["layers"]["fractions"] = None
    with pytest.raises(kvtool.UsageError) as error:
        kvtool.build_cache(plans[name].model, "rocketkv(window=4)", plan=data)
    assert told in str(error.value)
    assert "hint" in error.value.report() or error.value.hint


def test_an_edited_stage_may_keep_the_totals_of_before(plans):
    plan = plans["stages"]
    for name, value in (("top_k", 12), ("head_dims", 5)):
        data = edited(plan.data, ("rocketkv", name), value)
        assert run(plan.model, plan.policy, data) != plan.ran
        data["rocketkv"]["traffic"]["exact"] *= 1.5
        with pytest.raises(kvtool.UsageError, match=r"rocketkv\.traffic\.exact"):
            kvtool.build_cache(plan.model, plan.policy, plan=data)


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_commands_refuse_a_contradiction_before_the_weights_load(command, capsys, tmp_path):
    found = kvtool.plan(policy="h2o", tokens=30, context=220)
    path = tmp_path / "plan.yaml"
    path.write_text(found.to_yaml().replace("kv_heads: 2", "kv_heads: 4"))
    asked = ["--prompt", "x"] if command == "generate" else ["-t", "niah", "--lengths", "256"]
    assert main([command, str(path), *asked, "--dry-run"]) == 2
    assert "the plan's `model.kv_heads` is 4" in capsys.readouterr().err
