"""Bytes of plans by a profile, against the tensors of caches that follow them."""

import pytest
import torch

import kvtool
from kvtool.documents.memory import ModelShape
from kvtool.documents.plan import PlanDocument, Target
from kvtool.documents.profile import AnswerLosses, Metrics, ProfileData, ProfileDocument
from kvtool.generation import decode_step, prefill
from kvtool.model_shape import layer_shapes
from kvtool.planning.budgets import forecast_plan
from kvtool.planning.bytes import Text
from kvtool.planning.make_plan import make_plan
from kvtool.policies.allocate.d2o import D2O
from kvtool.policies.allocate.optimal import Optimal
from tests.cache.test_planned_heads import planned
from tests.models_for_tests import family_model, peaky_model, random_ids
from tests.planning.documents import of_heads
from tests.planning.test_forecast import bytes_of
from tests.tiers import first

HEADS = [[30, 50], [40, 40], [61, 19]]
TEXTS = [(90, 0), (90, 1), (50, 12), (38, 6)]
CASES = [  # a policy, and whether the plan's target is a share of the prompt
    ("h2o+int8", True),
    ("snapkv(window=8)+calidrop", False),
    # the exhaustive tier from here
    ("tova+every(steps=7)", False),
    ("expected", True),
    ("triattention(every=7,prompt=false)", False),
]


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama", num_hidden_layers=3, head_dim=32))


@pytest.mark.parametrize("case", first(2, CASES), ids=str)
def test_what_is_forecast_of_budgets_of_heads_is_held(model, case):
    policy, share = case
    target = {"tokens": None, "ratio": "40%"} if share else {}
    data = planned(model, HEADS, policy, **{"context": 100} | target)
    data["layers"]["min_tokens"] = 12 if share else 19
    plan = PlanDocument.model_validate(data)
    layers, value = layer_shapes(model.config, "float32"), kvtool.parse_policy(policy)
    for mode, n, new in [("block:32", 90, 12), *(("full", *text) for text in TEXTS)]:
        cache = kvtool.build_cache(model, policy, plan=data, prefill=mode)
        prefill(model, cache, random_ids(n, batch=2), new_tokens=new)
        held = [bytes_of(cache)]
        for token in random_ids(new + 1, seed=1)[0][:new]:
            decode_step(model, cache, token.expand(2))
            held.append(bytes_of(cache))
        text = Text(n, new, 2, plan.model.vocabulary)
        found = forecast_plan(plan, value, text, layers)
        assert found.storage == max(held), (mode, n, new)
        if new:
            assert found.traffic == cache.report().traffic_bytes, (mode, n, new)


def losses_of(heads):
    layers = [own and [max(column) for column in zip(*own, strict=True)] for own in heads]
    return AnswerLosses(
        policy="h2o",
        budgets=[12, 30],
        losses=layers,
        standard_errors=layers,
        by_sample=[layers] * 2,
        heads=of_heads(heads),
    )


def profiled(shape, tokens, **metrics):
    data = ProfileData(source="none", samples=2, tokens=tokens, seed=0, fingerprint="0")
    return ProfileDocument(model=shape, data=data, metrics=Metrics(**metrics))


HEAD_CASES = [
    ("gemma3", {"bytes": 2 * 34_000}),
    # the exhaustive tier from here
    ("llama", {"ratio": 0.3}),
    ("gpt_oss", {"tokens": 20}),
]


@pytest.mark.parametrize("case", first(1, HEAD_CASES), ids=str)
def test_planned_bytes_of_heads_are_held(case):
    """The profile's lengths are those of the prompt; the target in bytes leaves no slot unused."""
    family, target = case
    model, prompt = kvtool.attach(family_model(family)), 60
    shape = ModelShape.of(model.config, name=family, dtype="float32")
    shapes = layer_shapes(model.config, "float32")
    curves = [[0.4, 0.1], [3.0, 1.0], [0.02, 0.01], [0.9, 0.1]]
    heads = [
        None if each is None or each.window else [curves[(i + h) % 4] for h in range(each.kv_heads)]
        for i, each in enumerate(shapes)
    ]
    plan = make_plan(
        shape,
        Optimal(heads=True),
        Target(context=prompt + 4, max_new_tokens=4, batch=2, **target),
        profile=profiled(shape, prompt, answer_loss=losses_of(heads)),
        policy=kvtool.parse_policy("h2o"),
        layers=shapes,
    ).document
    assert any(len(set(own)) > 1 for own in plan.layers.heads if own)
    cache = kvtool.build_cache(model, "h2o", plan=plan)
    prefill(model, cache, random_ids(prompt, batch=2), new_tokens=4)
    for token in range(5, 9):
        decode_step(model, cache, torch.tensor([token, token]))
    assert bytes_of(cache) == plan.totals.storage.bytes
    for i, own in enumerate(plan.layers.heads):
        if own is not None:
            kept = (cache.kept_positions(i) >= 0).sum(-1)
            assert kept.tolist() == [own, own]
    if "bytes" in target:
        assert 0 <= target["bytes"] - plan.totals.storage.bytes < 2 * 4 * 2 * 144


LAYER_CASES = [
    ("falcon_h1", {"ratio": 0.3}),
    ("gemma3n", {"bytes": 2 * 16_000}),
    # the exhaustive tier from here
    ("deepseek_v3", {"tokens": 20}),
    ("llama4", {"ratio": 0.3}),
]


@pytest.mark.parametrize("case", first(2, LAYER_CASES), ids=str)
def test_planned_bytes_of_layers_are_held(case):
    """Layers without attention, with windows, chunks or latents, and that share a cache."""
    family, target = case
    model, prompt = kvtool.attach(family_model(family)), 60
    shape = ModelShape.of(model.config, name=family, dtype="float32")
    variance = [1.0 + 20.0 * i for i in range(shape.layers)]
    plan = make_plan(
        shape,
        D2O(),
        Target(context=prompt, batch=2, **target),
        profile=profiled(shape, prompt, f_variance=variance),
        layers=layer_shapes(model.config, "float32"),
    ).document
    cache = kvtool.build_cache(model, "recency", plan=plan)
    prefill(model, cache, random_ids(prompt, batch=2))
    report = cache.report()
    assert report.kept_per_layer == plan.layers.tokens
    assert report.kv_bytes == plan.totals.bytes
    assert report.kv_bytes / report.full_bytes == plan.totals.share_of_full
