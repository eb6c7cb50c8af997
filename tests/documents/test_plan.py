import pytest
import yaml

from kvtool.documents.plan import PlanDocument, Target
from kvtool.documents.source import Source
from kvtool.documents.tree import DocumentError
from kvtool.sizes import Budget

PLAN = """\
kind: plan
schema_version: 1
model:
  id: toy
  config_hash: abc
  layers: 3
  heads: 4
  kv_heads: 2
  head_dim: 32
  layer_types: [full_attention, sliding_attention, full_attention]
  sliding_window: 64
  kv_bytes_per_token: 768
target: {ratio: 20%, context: 1128, max_new_tokens: 128}
layers:
  allocator: d2o
  min_tokens: 8
  tokens: [250, 63, 150]
  fractions: [0.25, null, 0.15]
totals: {tokens: 463, bytes: 118528, share_of_full: 0.2244}
"""


def read(text, name="plan.yaml"):
    return Source.parse(text, name).validate(PlanDocument)


def refused(text):
    with pytest.raises(DocumentError) as error:
        read(text)
    return error.value.report()


def test_a_plan_is_read():
    plan = read(PLAN)
    assert plan.free_layers == [0, 2]
    assert plan.target.prompt_tokens == 1000
    assert plan.target.budget == Budget.parse("20%")
    assert (plan.rocketkv, plan.policy, plan.target.batch) == (None, None, 1)


def test_a_plan_that_is_written_reads_back():
    plan = read(PLAN)
    assert read(plan.to_yaml()) == plan
    assert read(plan.to_json()) == plan
    assert list(yaml.safe_load(plan.to_yaml())) == [
        "kind",
        "schema_version",
        "model",
        "target",
        "layers",
        "totals",
    ]


def test_a_ratio_is_written_as_a_number_where_that_is_exact():
    for typed, written in [("20%", 0.2), ("1/3", "1/3"), (1, 1.0), ("12.5%", 0.125)]:
        target = Target(ratio=typed, context=10)
        assert target.model_dump()["ratio"] == written
        assert Target(**target.model_dump()) == target
        assert target.budget.ratio == (1 if typed == 1 else Budget.parse(typed).ratio)


def test_a_target_is_one_size():
    for given in ({}, {"ratio": 0.2, "tokens": 5}, {"tokens": 5, "bytes": 5}):
        with pytest.raises(ValueError, match="must have one of ratio, tokens, bytes, got"):
            Target(context=10, **given)


MISTAKES = {  # what is changed: into what, where it is reported, what is said
    "a share above 1": ("ratio: 20%", "ratio: 120%", "13:17: target.ratio", "above 1"),
    "no share": ("ratio: 20%", "ratio: 64MiB", "13:17", "`64MiB` is not a share"),
    "two targets": ("ratio: 20%", "ratio: 20%, tokens: 5", "13:9", "got ratio and tokens"),
    "no prompt": ("max_new_tokens: 128", "max_new_tokens: 1128", "13:9", "leaves no prompt in"),
    "an unknown key": ("allocator: d2o", "alocator: d2o", "15:3", "did you mean `allocator`?"),
    "a layer too few": ("[250, 63, 150]", "[250, 63]", "1:1", "has 2 entries, but the model 3"),
    "a layer below the least": ("[250,", "[7,", "1:1", "`layers.tokens.0` is 7, below"),
    "a share above the prompt": ("0.25,", "1.25,", "18:15: layers.fractions.0", "at most 1"),
    "half a token": ("[250,", "[250.5,", "17:12: layers.tokens.0", "whole number"),
    "another target": ("[250, 63, 150]", "[251, 63, 150]", "17:11: layers.tokens", "401 together"),
    "no layers": ("layers: 3", "layers: 0", "6:11: model.layers", "above 0"),
}


def test_mistakes_are_told_with_their_place():
    for name, (before, after, place, message) in MISTAKES.items():
        assert before in PLAN
        told = refused(PLAN.replace(before, after, 1))
        assert f"plan.yaml:{place}" in told, name
        assert message in told, name


def test_mistakes_are_told_together():
    text = PLAN.replace("heads: 4", "heads: many").replace("min_tokens: 8", "min_tokens: 0")
    told = refused(text)
    assert "7:10: model.heads" in told
    assert "16:15: layers.min_tokens" in told


def test_a_plan_without_free_layers_is_refused():
    text = PLAN.replace("[full_attention, sliding_attention, full_attention]", "[x, x, x]")
    text = text.replace("[0.25, null, 0.15]", "[null, null, null]")
    assert "no layer has a budget to plan" in refused(text)
