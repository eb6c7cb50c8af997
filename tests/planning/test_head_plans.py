"""Bytes of plans with budgets of KV heads, against the tensors of caches that follow them."""

import pytest
import torch

import kvtool
from kvtool.documents.memory import ModelShape
from kvtool.documents.plan import PlanDocument, Target
from kvtool.documents.profile import AnswerLosses, Metrics, ProfileData, ProfileDocument
from kvtool.generation import decode_step, prefill
from kvtool.model_shape import layer_shapes
from kvtool.planning.bytes import Text
from kvtool.planning.held import forecast_plan
from kvtool.planning.plan import make_plan
from kvtool.policies.allocate.optimal import Optimal
from tests.cache.test_planned_heads import planned
from tests.models_for_tests import family_model, peaky_model, random_ids
from tests.planning.documents import of_heads
from tests.planning.test_forecast import bytes_of

pytestmark = pytest.mark.few(2)

HEADS = [[30, 50], [40, 40], [61, 19]]
TEXTS = [(90, 0), (90, 1), (90, 12), (300, 70), (50, 30), (40, 3), (38, 12)]
POLICIES = [
    "h2o",
    "h2o+caote",
    "h2o+int8",
    "roco",
    "streaming",
    "random",
    "tova+every(steps=7)",
    "snapkv(window=8)",
    "snapkv(window=8)+k8v4",
    "snapkv(window=8)+calidrop",
    "snapkv(window=8)+critical",
    "snapkv(window=8)+every(steps=5)",
    "snapkv(window=8)+cam",
    "expected",
    "lagkv",
    "keydiff",
    "triattention(every=7,prompt=false)",
]


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama", num_hidden_layers=3, head_dim=32))


@pytest.mark.few(4)
@pytest.mark.each_once
@pytest.mark.parametrize("mode", ["full", "block:32"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("share", [False, True])
def test_what_is_forecast_is_held(model, policy, mode, share):
    target = {"tokens": None, "ratio": "40%"} if share else {}
    data = planned(model, HEADS, policy, **{"context": 100} | target)
    data["layers"]["min_tokens"] = 12 if share else 19
    plan = PlanDocument.model_validate(data)
    layers, value = layer_shapes(model.config, "float32"), kvtool.parse_policy(policy)
    for n, new in TEXTS if mode == "full" else TEXTS[2:5]:
        cache = kvtool.build_cache(model, policy, plan=data, prefill=mode)
        prefill(model, cache, random_ids(n, batch=2), new_tokens=new)
        held = [bytes_of(cache)]
        for token in random_ids(new + 1, seed=1)[0][:new]:
            decode_step(model, cache, token.expand(2))
            held.append(bytes_of(cache))
        text = Text(n, new, 2, plan.model.vocabulary)
        found = forecast_plan(plan, value, text, layers)
        assert found.storage == max(held), (n, new)
        if new:
            assert found.traffic == cache.report().traffic_bytes, (n, new)


def profiled(shape, heads, tokens):
    layers = [own and [max(column) for column in zip(*own, strict=True)] for own in heads]
    losses = AnswerLosses(
        policy="h2o",
        budgets=[12, 30],
        losses=layers,
        standard_errors=layers,
        by_sample=[layers] * 2,
        heads=of_heads(heads),
    )
    data = ProfileData(source="none", samples=2, tokens=tokens, seed=0, fingerprint="0")
    return ProfileDocument(model=shape, data=data, metrics=Metrics(answer_loss=losses))


@pytest.mark.parametrize("target", [{"ratio": 0.3}, {"tokens": 20}, {"bytes": 2 * 34_000}])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "qwen3"])
def test_planned_bytes_are_held(family, target):
    """The profile's lengths are those of the prompt; the target in bytes leaves no slot unused."""
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
        profile=profiled(shape, heads, prompt),
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
