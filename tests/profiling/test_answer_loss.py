"""What the answer loses where one layer is cut, against a fresh read for every cell."""

import itertools
from contextlib import nullcontext

import pytest
import torch

import kvtool
from kvtool.documents.memory import ModelShape
from kvtool.documents.plan import Target
from kvtool.errors import KvtoolError, UsageError
from kvtool.planning.make_plan import make_plan
from kvtool.policies.allocate.uniform import Uniform
from kvtool.policies.grammar import parse_policy
from kvtool.profiling import answer_loss as module
from kvtool.profiling.answer_loss import AskedText, answer_loss, head_losses
from kvtool.profiling.request import read_request
from tests.models_for_tests import family_model, peaky_model, random_ids
from tests.reference.oracle import Oracle
from tests.reference.policies import Reference, build

PROMPT, REST = 40, 6


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
    ["h2o", "tova", "snapkv(window=4)", "keydiff"],
)
def test_losses_equal_those_of_a_fresh_read_for_each_cell(model, policy):
    found = losses(model, policy, [15, 26])
    torch.testing.assert_close(found, slow_losses(model, policy, [15, 26]), rtol=2e-3, atol=2e-6)
    assert found.min() > 1e-6


@pytest.mark.parametrize("policy", ["snapkv(window=4)+ada", "h2o+d2o-merge", "h2o+int8"])
def test_heads_that_differ_merged_tokens_and_codes_count_as_well(model, policy):
    found = losses(model, policy, [20])
    torch.testing.assert_close(found, slow_losses(model, policy, [20]), rtol=2e-2, atol=2e-5)
    assert found.min() > 1e-6


class OneCut(Reference):
    """A policy cuts one head of a prompt; nothing else ever leaves."""

    def __init__(self, policy=None, head=None):
        super().__init__(0)
        self.policy, self.head = policy, head

    def observe(self, attention):
        if self.policy is not None and self.in_prompt:
            self.policy.observe(attention)

    in_prompt = True

    def keep(self, head, positions, values):
        cut = self.in_prompt and head == self.head
        return self.policy.keep(head, positions, values) if cut else list(positions)


def slow_head_losses(model, make, budgets, asked=0):
    """Attend, in a loop over heads and tokens, to what a policy has left of one head alone."""
    read, rest = text().prompt[0].tolist(), text().rest[0].tolist()
    layers, heads = len(model.model.layers), model.config.num_key_value_heads

    def chances(cut=None, policy=None, head=None):
        own = iter([OneCut(policy, head) if i == cut else OneCut() for i in range(layers)])
        oracle = Oracle(model, lambda: next(own))
        oracle.feed(read)
        oracle.in_prompt = False
        return [oracle.feed([token]).double().softmax(-1) for token in rest]

    kvtool.detach(model)
    full, found = chances(), torch.zeros(layers, heads, len(budgets), dtype=torch.float64)
    places = range(asked - 1, REST - 1) if asked else range(REST)
    for layer, head, i in itertools.product(range(layers), range(heads), range(len(budgets))):
        after = chances(layer, make(budgets[i]), head)
        apart = [(full[p] * (full[p] / after[p]).log()).sum() for p in places]
        found[layer, head, i] = sum(apart) / len(places)
    kvtool.attach(model)
    return found


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("tova", {"head_reduce": "kv_head"}),
        ("snapkv", {"window": 4}),
    ],
)
def test_losses_of_heads_equal_those_of_a_loop_over_heads(model, policy, options):
    spelled = policy.replace("snapkv", "snapkv(window=4)")
    found = head_losses(model, parse_policy(spelled), [15, 26], text())
    expected = slow_head_losses(model, lambda budget: build(policy, budget, **options), [15, 26])
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=5e-6)
    assert found.shape == (2, 2, 2)
    assert found.min() > 1e-6


def test_losses_of_heads_behind_a_question_and_of_budgets_that_fit(model):
    found = head_losses(model, parse_policy("h2o"), [20], text(asked=4))
    slow = slow_head_losses(model, lambda budget: build("h2o", budget), [20], asked=4)
    torch.testing.assert_close(found, slow, rtol=5e-3, atol=5e-6)
    assert head_losses(model, parse_policy("h2o"), [PROMPT], text()).max() < 1e-6


def test_heads_of_layers_with_a_window_have_no_number():
    model = kvtool.attach(family_model("gemma3"))
    found = head_losses(model, parse_policy("h2o"), [20], text())
    assert found.isnan().all(-1).all(-1).tolist() == [True, False, True, False]
    assert not found[1].isnan().any()


def test_only_the_answer_behind_a_question_counts(model):
    found = losses(model, "h2o", [20], asked=4)
    torch.testing.assert_close(
        found, slow_losses(model, "h2o", [20], asked=4), rtol=2e-3, atol=2e-6
    )
    assert not torch.allclose(found, losses(model, "h2o", [20]), rtol=1e-2)


def test_a_budget_that_fits_loses_nothing(model):
    assert losses(model, "snapkv(window=4)", [PROMPT, 200]).max() < 1e-6


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
    found = answer_loss(kvtool.attach(family_model("gemma3")), parse_policy("h2o"), [8], text())
    assert found.isnan()[:, 0].tolist() == [True, False, True, False]
    assert found[1, 0] > 0


def test_models_that_cannot_be_replayed_are_refused():
    with pytest.raises(KvtoolError, match="latent"):
        losses(kvtool.attach(family_model("deepseek_v3")), "h2o", [20])


def asked_for(**changes):
    given = {"samples": 2, "tokens": 64, "decode": 8, "policy": "h2o", "budgets": None, "seed": 0}
    given = given | {"metrics": "answer_loss"} | changes
    return read_request(given.pop("metrics"), data="builtin", **given)


def test_what_cannot_be_measured_is_refused_before_anything_loads():
    for changes, told in [
        ({"samples": 1}, "answer_loss needs 2 samples or more"),
        ({"policy": "full"}, "`full` keeps everything; answer_loss is measured layer by layer"),
        ({"policy": "quest"}, "`quest` reads part of what it stores"),
        ({"policy": "kvzip"}, "cuts its layers together"),
        ({"policy": "h2o+pyramid"}, "splits a budget over the layers; answer_loss is measured"),
        ({"policy": "streaming(positions=cache)"}, "numbers tokens anew"),
        ({"budgets": ["65"]}, "65 is not within the 64 tokens of a text"),
    ]:
        with pytest.raises(UsageError, match=told.replace("(", r"\(")):
            asked_for(**changes)


def test_the_default_policy_is_that_of_output_errors():
    plan = asked_for(policy=None).plan
    assert (str(plan.policy), plan.budgets) == ("h2o", (4, 8, 16, 32))


def test_policies_of_equal_heads_have_no_losses_of_heads():
    for policy, told in [
        ("adakv", "splits its budget over the KV heads by itself"),
        ("h2o+ada", "splits its budget over the KV heads by itself"),
        ("rkv", "keeps the newest queries of a whole layer"),
        ("snapkv+chunk", "keeps the same tokens in all KV heads of a layer"),
    ]:
        with pytest.raises(UsageError, match=told) as error:
            asked_for(policy=policy, tokens=600, metrics="answer_loss(heads=true)")
        assert error.value.hint == "--metrics answer_loss measures layers alone"
        assert not asked_for(policy=policy, tokens=600).plan.heads


def test_settings_of_a_metric_that_cannot_be_read():
    for metrics, told in [
        ("f_variance(heads=true)", "cannot read `f_variance(heads=true)` in --metrics"),
        ("answer_loss(heads=true", "cannot read `answer_loss(heads=true` in --metrics"),
        ("answer_loss(head=true)", "`answer_loss` has no parameter `head`; it takes heads"),
        ("answer_loss(heads=2)", "answer_loss: heads must be true or false, got `2`"),
    ]:
        with pytest.raises(UsageError) as error:
            asked_for(metrics=metrics)
        assert told in error.value.report()


def test_heads_are_asked_for_by_a_setting_of_the_metric():
    assert asked_for(metrics="entropy,answer_loss(heads=true)").plan.heads
    assert not asked_for(metrics="answer-loss(heads=false)").plan.heads
    assert asked_for(metrics=["entropy", "Answer_Loss(heads=true)"]).plan.metrics == (
        "entropy",
        "answer_loss",
    )
