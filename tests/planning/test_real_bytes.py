"""What a plan says it takes, against the tensors of a cache that follows it."""

import pytest
import torch

from kvtool.cache.build import build_cache
from kvtool.cache.hooks.attach import attach
from kvtool.documents.memory import ModelShape
from kvtool.documents.plan import Target
from kvtool.documents.profile import Metrics, ProfileData, ProfileDocument
from kvtool.model_shape import layer_shapes
from kvtool.planning.plan import make_plan
from kvtool.policies.allocate.d2o import D2O
from kvtool.policies.allocate.pyramid import Pyramid
from tests.models_for_tests import family_model

PROMPT, BATCH = 60, 2
TARGETS = ({"ratio": 0.3}, {"tokens": 20}, {"bytes": 2 * 16_000})


def profiled(shape):
    variance = [1.0 + 20.0 * i for i in range(shape.layers)]
    data = ProfileData(source="none", samples=1, tokens=PROMPT, seed=0, fingerprint="0")
    return ProfileDocument(model=shape, data=data, metrics=Metrics(f_variance=variance))


@pytest.mark.parametrize(
    "family",
    ["llama", "gemma3", "falcon", "deepseek_v3", "qwen3_next", "falcon_h1", "gemma3n", "llama4"],
)
def test_planned_bytes_are_held(family):
    model = attach(family_model(family))
    shape = ModelShape.of(model.config, name=family, dtype="float32")
    ids = torch.randint(2, 90, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0))
    for target in TARGETS:
        for allocator in (D2O(), Pyramid(window=1)):
            plan = make_plan(
                shape,
                allocator,
                Target(context=PROMPT, batch=BATCH, **target),
                profile=profiled(shape),
                layers=layer_shapes(model.config, "float32"),
            ).document
            cache = build_cache(model, "recency", plan=plan)
            with torch.no_grad():
                model(ids, past_key_values=cache, use_cache=True)
            report = cache.report()
            assert report.kept_per_layer == plan.layers.tokens
            assert report.kv_bytes == plan.totals.bytes
            assert report.kv_bytes / report.full_bytes == plan.totals.share_of_full
