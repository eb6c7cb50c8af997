"""What the answer loses where one layer is cut, against a fresh read for every cell."""

from contextlib import nullcontext

import pytest
import torch

import kvtool
from kvtool.documents.memory import ModelShape
from kvtool.documents.plan import Target
from kvtool.errors import KvtoolError, UsageError
from kvtool.planning.plan import make_plan
from kvtool.policies.allocate.uniform import Uniform
from kvtool.policies.grammar import parse_policy
from kvtool.profiling import answer_loss as module
from kvtool.profiling.answer_loss import AskedText, answer_loss
from kvtool.profiling.request import read_request
from tests.models_for_tests import family_model, peaky_model, random_ids

PROMPT, REST = 60, 9


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama"))


def text(asked=0):
    return AskedText(random_ids(PROMPT), random_ids(REST, seed=5), asked)


def losses(model, policy, budgets, asked=0):
    return answer_loss(model, parse_policy(policy), budgets, text(asked))


def cut_alone(model, layer, budget):
    """A plan that cuts one layer to a budget, and no other layer at all."""
    shape = ModelShape.of(model.config, name="toy", revision=None, dtype="float32")
    document = make_plan(shape, Uniform(), Target(tokens=PROMPT, context=PROMPT)).document
    tokens = [budget if i == layer else PROMPT for i in range(shape.layers)]
    layers = document.layers.model_copy(update={"tokens": tokens, "min_tokens": 1})
    return document.model_copy(update={"layers": layers, "totals": None, "rocketkv": None})


def slow_losses(model, policy, budgets, asked=0):
    """Read everything anew for each cell, by the policy's own cache and a plan for one layer."""
    read, rest = text().prompt, text().rest

    def chances(cache):
        kvtool.generation.prefill(model, cache, read)
        with cache.budgets.raising(), torch.no_grad():
            logits = model(rest, past_key_values=cache, use_cache=True).logits.double()
        return logits[0].softmax(-1)

    full = chances(kvtool.build_cache(model, "full"))
    places = range(asked - 1, REST - 1) if asked else range(REST)
    found = torch.zeros(len(model.model.layers), len(budgets), dtype=torch.float64)
    for layer in range(len(found)):
        for i, budget in enumerate(budgets):
            plan = cut_alone(model, layer, budget)
            cut = chances(kvtool.build_cache(model, policy, plan=plan))
            for place in places:
                for before, after in zip(full[place].tolist(), cut[place].tolist(), strict=True):
                    found[layer, i] += before * torch.log(torch.tensor(before / after)).item()
            found[layer, i] /= len(places)
    return found


@pytest.mark.parametrize(
    "policy",
    ["h2o", "streaming", "tova", "snapkv(window=4)", "keydiff", "expected", "h2o+caote"],
)
def test_losses_equal_those_of_a_fresh_read_for_each_cell(model, policy):
    found = losses(model, policy, [20, 40])
    torch.testing.assert_close(found, slow_losses(model, policy, [20, 40]), rtol=2e-3, atol=2e-6)
    assert found.min() > 1e-6


@pytest.mark.parametrize("policy", ["snapkv(window=4)+ada", "h2o+d2o-merge", "h2o+int8"])
def test_heads_that_differ_merged_tokens_and_codes_count_as_well(model, policy):
    found = losses(model, policy, [20])
    torch.testing.assert_close(found, slow_losses(model, policy, [20]), rtol=2e-2, atol=2e-5)
    assert found.min() > 1e-6


def test_only_the_answer_behind_a_question_counts(model):
    found = losses(model, "h2o", [20], asked=4)
    torch.testing.assert_close(
        found, slow_losses(model, "h2o", [20], asked=4), rtol=2e-3, atol=2e-6
    )
    assert not torch.allclose(found, losses(model, "h2o", [20]), rtol=1e-2)


@pytest.mark.parametrize("policy", ["h2o", "snapkv(window=4)", "keydiff"])
def test_a_budget_that_fits_loses_nothing(model, policy):
    assert losses(model, policy, [PROMPT, 200]).max() < 1e-6


def test_the_model_and_its_layers_are_left_as_they_were(model):
    before = model(random_ids(12)).logits
    losses(model, "h2o", [20])
    assert torch.equal(model(random_ids(12)).logits, before)
    assert not any("forward" in layer.__dict__ for layer in model.model.layers)
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_layers_below_the_cut_one_do_not_run_again(monkeypatch):
    model, ran = kvtool.attach(family_model("qwen3")), []
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(lambda *_, i=i: ran.append(i))
    fast = losses(model, "h2o", [20])
    whole = [0, 1, 2, 3]  # to read, to follow, and where the first or the second layer is cut
    assert ran == [*whole * 4, 0, 2, 3, 0, 3]
    monkeypatch.setattr(module._Lower, "replayed", lambda self, below: nullcontext())
    torch.testing.assert_close(losses(model, "h2o", [20]), fast, rtol=1e-3, atol=1e-7)
    assert len(ran) == 21 + 6 * 4


def test_layers_with_a_window_of_their_own_have_no_number():
    found = answer_loss(kvtool.attach(family_model("gemma3")), parse_policy("h2o"), [20], text())
    assert found.isnan()[:, 0].tolist() == [True, False, True, False]
    assert found[1, 0] > 0


def test_models_that_cannot_be_replayed_are_refused():
    with pytest.raises(KvtoolError, match="latent"):
        losses(kvtool.attach(family_model("deepseek_v3")), "h2o", [20])


def asked_for(**changes):
    given = {"samples": 2, "tokens": 64, "decode": 8, "policy": "h2o", "budgets": None, "seed": 0}
    return read_request("answer_loss", data="builtin", **(given | changes))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"samples": 1}, "answer_loss needs 2 samples or more"),
        ({"policy": "full"}, "`full` keeps everything, so it has no answer_loss"),
        ({"policy": "quest"}, "`quest` reads part of what it stores"),
        ({"policy": "kvzip"}, "are cut together"),
        ({"policy": "h2o+pyramid"}, "splits a budget over the layers; answer_loss is measured"),
        ({"policy": "streaming(positions=cache)"}, "numbers tokens anew"),
        ({"budgets": ["65"]}, "65 is above the 64 tokens of a text"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_loads(changes, told):
    with pytest.raises(UsageError, match=told.replace("(", r"\(")):
        asked_for(**changes)


def test_the_default_policy_is_that_of_output_errors():
    plan = asked_for(policy=None).plan
    assert (str(plan.policy), plan.budgets) == ("h2o", (4, 8, 16, 32))
