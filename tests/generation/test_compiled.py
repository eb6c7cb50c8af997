"""Compiled decode: equal to eager, and compiled once for all steps.

The graphs are run as they are traced (backend `eager`): what is tested is that policies, caches and
models make whole graphs that hold from step to step, not the compiler behind them.
"""

import json
from dataclasses import dataclass

import pytest
import torch

import kvtool
from kvtool.cli.main import main
from kvtool.errors import KvtoolError
from kvtool.generation import decode_step, prefill
from kvtool.generation.compiled import CompiledDecoding
from kvtool.policies.policy import Policy
from kvtool.policies.scores.recency import Recency
from tests.models_for_tests import peaky_model, random_ids

STEADY = ["streaming", "h2o+caote", "roco", "tova", "d2o+uniform", "streaming+cam"]
STEADY += ["h2o(positions=cache)"]
APPENDING = ["full", "snapkv(window=4)"]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def filled(model, policy, padded):
    cache = kvtool.build_cache(model, policy, None if policy == "full" else 20)
    ids = random_ids(60, batch=2)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :45] = 0
    prefill(model, cache, ids, mask)
    return cache


def run_both(model, policy, padded, room, steps):
    """The largest difference of the logits; the caches must agree in all they hold."""
    eager, compiled = filled(model, policy, padded), filled(model, policy, padded)
    step = CompiledDecoding(model, room, backend="eager")
    worst = 0.0
    for i in range(steps):
        token = torch.tensor([i + 2, i + 3])
        logits = step(model, compiled, token)
        worst = max(worst, (logits - decode_step(model, eager, token)).abs().max().item())
    layers = range(model.config.num_hidden_layers)
    assert all(torch.equal(eager.kept_positions(i), compiled.kept_positions(i)) for i in layers)
    assert eager.report().kv_bytes == compiled.report().kv_bytes
    return worst, step, eager, compiled


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("policy", [*STEADY, *APPENDING])
def test_compiled_steps_equal_eager_ones_and_share_two_graphs(policy, padded):
    model = kvtool.attach(peaky_model("llama"))
    worst, step, *_ = run_both(model, policy, padded, room=64, steps=16)
    assert worst < 1e-4
    report = step.report()
    assert report.eager_steps == (0 if policy in APPENDING else 1)
    assert report.compiled_steps == 16 - report.eager_steps
    assert report.graphs == 2
    assert report.compile_s > 0


@pytest.mark.parametrize("policy", ["adakv(window=4)", "h2o+ada", "snapkv(window=4)"])
def test_turns_go_on_after_compiled_steps(policy):
    model = kvtool.attach(peaky_model("llama"))
    worst, _, eager, compiled = run_both(model, policy, False, room=6, steps=10)
    assert worst < 1e-4
    more = random_ids(7, seed=3, batch=2)
    torch.testing.assert_close(prefill(model, compiled, more), prefill(model, eager, more))


def test_rooms_that_are_used_up_are_followed_by_others():
    model = kvtool.attach(peaky_model("llama"))
    cache = filled(model, "snapkv(window=4)", False)
    step = CompiledDecoding(model, 4, backend="eager")
    held = []
    for i in range(9):
        step(model, cache, torch.tensor([i + 2, i + 3]))
        held.append(cache.layers[0].used)
    assert held == [24] * 4 + [28] * 4 + [32]
    assert cache.report().kept_per_layer == [29, 29]


def test_saved_caches_hold_no_empty_room(tmp_path):
    model = kvtool.attach(peaky_model("llama"))
    *_, eager, compiled = run_both(model, "snapkv(window=4)", False, room=30, steps=5)
    sizes = []
    for name, cache in (("eager", eager), ("compiled", compiled)):
        kvtool.save_cache(cache, tmp_path / name, model=model)
        sizes.append((tmp_path / name).stat().st_size)
    assert sizes[0] == sizes[1]


@dataclass(frozen=True)
class Asking(Recency):
    """Looks at the device in every step, as no policy of ours does."""

    def importance(self, state, view, rows):
        if view.positions.max().item() < 0:
            raise AssertionError
        return view.positions.float()


def test_what_cannot_be_compiled_says_so():
    model = kvtool.attach(peaky_model("llama"))
    cache = filled(model, Policy(Asking()), False)
    step = CompiledDecoding(model, 8, backend="eager")
    step(model, cache, torch.tensor([2, 3]))
    with pytest.raises(KvtoolError, match="policy `recency` on `llama` cannot be compiled"):
        step(model, cache, torch.tensor([2, 3]))


def test_what_asks_the_host_is_left_as_it_is():
    model = kvtool.attach(peaky_model("llama"))
    worst, step, *_ = run_both(model, "h2o+calidrop", False, room=8, steps=4)
    assert (worst, step.report().compiled_steps, step.report().eager_steps) == (0.0, 0, 4)


def test_the_command_compiles_and_says_what(capsys):
    """With the real compiler, which takes a while."""
    command = ["generate", "-p", "h2o", "-b", "100", "-n", "12", "-f", "json"]
    documents = []
    for flags in ([], ["--compile"]):
        capsys.readouterr()
        assert main([*command, *flags]) == 0
        captured = capsys.readouterr()
        documents.append(json.loads(captured.out))
    eager, compiled = documents
    assert compiled["token_ids"] == eager["token_ids"]
    assert compiled["cache"] == eager["cache"]
    assert "compiled" not in eager
    steps = compiled["new_tokens"] - 1
    assert compiled["compiled"]["eager_steps"] == 1
    assert compiled["compiled"]["compiled_steps"] == steps - 1
    assert compiled["compiled"]["graphs"] in (1, 2)
    assert f"{steps - 1} of {steps} steps ran compiled" in captured.err
