"""Results do not depend on `torch.set_default_dtype`, which a program sets for its own tensors."""

import pytest
import torch

import kvtool
from kvtool.generation import decode_step, prefill
from kvtool.policies.table import BASES
from tests.models_for_tests import cutting, peaky_model, random_ids
from tests.tiers import first

WINDOW = {name: f"{name}(window=4)" for name in ("snapkv", "pyramidkv", "adakv")}
KINDS = [
    "d2o",
    "h2o+calidrop(store=int8)",
    "snapkv(window=4)+cam",
    "streaming(positions=cache)",
    "h2o+fp8",
    "rocketkv",
]
OTHERS = [
    "h2o+calidrop",
    "h2o+d2o-merge",
    "full+int8",
    "h2o+ada",
    "tova+d2o-alloc",
    *(WINDOW.get(name, cutting(name)) for name in BASES if name not in (*KINDS, "kvzip")),
]


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama"))


def run(model, policy):
    budget = None if policy.startswith("full") else 40
    cache = kvtool.build_cache(model, policy, budget)
    logits = [prefill(model, cache, random_ids(60), new_tokens=4)]
    logits += [decode_step(model, cache, token[None]) for token in random_ids(4, seed=3)[0]]
    kept = [cache.kept_positions(layer).tolist() for layer in range(2)]
    return torch.stack(logits).double(), kept, str(cache.report())


@pytest.mark.parametrize("policies", first(6, [[each] for each in KINDS] + [OTHERS]))
def test_a_policy_gives_the_same_whatever_the_default_is(model, policies):
    for policy in policies:
        logits, kept, report = run(model, policy)
        for dtype in (torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            try:
                found = run(model, policy)
            finally:
                torch.set_default_dtype(torch.float32)
            assert torch.equal(found[0], logits), policy
            assert found[1:] == (kept, report), policy
