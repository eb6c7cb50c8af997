"""Compiled decode: equal to eager, and compiled once for all steps.

The graphs are run as they are traced (backend `eager`): what is tested is that policies, caches and
models make whole graphs that hold from step to step, not the compiler behind them.
"""

import gc
import json
import os
import subprocess
import sys
import weakref
from dataclasses import dataclass, replace
from tempfile import gettempdir
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.exc import InvalidCxxCompiler

import kvtool
from kvtool.cache.slots.buffers import SlotBuffers
from kvtool.cache.steps.static import stationary
from kvtool.cli.main import main
from kvtool.errors import KvtoolError
from kvtool.generation import decode_step, prefill
from kvtool.generation.compiled import _keep_compiled, pays
from kvtool.generation.graphs import StaticDecoding
from kvtool.policies.policy import Policy
from kvtool.policies.scores.recency import Recency
from tests.models_for_tests import family_model, peaky_model, random_ids
from tests.tiers import first

STEADY = [
    *("h2o+caote", "streaming", "roco", "d2o+uniform", "streaming+cam", "h2o(positions=cache)"),
    *("h2o+ada", "h2o+caote+int8", "tova+fp8", "streaming(positions=cache)+int4", "h2o+k8v4"),
]
APPENDING = ["full", "lagkv", "adakv(window=4)", "snapkv(window=4)+int4"]
PACED = ["h2o+every(steps=6)", "rkv(window=4,buffer=6)", "tova+caote+every(steps=6)"]
PACED += ["snapkv(window=4)+every(steps=6)", "d2o+uniform+every(steps=6)"]
APART = ["adakv(window=4)+every(steps=6)", "roco+ada+every(steps=6)"]
READING = ["rocketkv", "exact-topk(scope=group)", "quest", "sparq(local=4)", "loki"]
READING += ["loki(scope=query_head)", "hsa", "rocketkv-mt"]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def small(**changes):
    """A model of one layer, whose graph takes half of the time to trace."""
    return kvtool.attach(peaky_model("llama", num_hidden_layers=1, **changes))


def filled(model, policy, padded=False):
    cache = kvtool.build_cache(model, policy, None if str(policy).startswith("full") else 20)
    ids = random_ids(60, batch=2)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :45] = 0
    prefill(model, cache, ids, mask)
    return cache


def run_both(model, policy, padded, room, steps, backend="eager"):
    """The largest difference of the logits; the caches must agree in all they hold."""
    eager, compiled = filled(model, policy, padded), filled(model, policy, padded)
    step = StaticDecoding(model, room, backend=backend, compiled=True)
    worst = 0.0
    for i in range(steps):
        token = torch.tensor([i + 2, i + 3])
        logits = step(model, compiled, token)
        worst = max(worst, (logits - decode_step(model, eager, token)).abs().max().item())
    check_same(eager, compiled)
    return worst, step, eager, compiled


def check_same(eager, compiled):
    layers = range(len(eager.slot_layers))
    assert all(torch.equal(eager.kept_positions(i), compiled.kept_positions(i)) for i in layers)
    assert eager.report().kv_bytes == compiled.report().kv_bytes


class Graphs:
    """A backend that keeps what it is given and runs it as it is."""

    def __init__(self):
        self.modules, self.inputs = [], []

    def __call__(self, module, inputs):
        self.modules.append(module)
        self.inputs += [each for each in inputs if isinstance(each, torch.Tensor)]
        return module

    def nodes(self, kind):
        return [node for module in self.modules for node in module.graph.nodes if node.op == kind]


def check_can_be_a_cuda_graph(graphs, step, model, cache):
    """No number of the host, nothing but logits returned, changes only at fixed addresses."""
    assert all(
        isinstance(node.meta["example_value"], torch.Tensor) for node in graphs.nodes("placeholder")
    )
    (output,) = graphs.nodes("output")
    assert len(output.args[0]) == 1
    assert len({each.untyped_storage().data_ptr() for each in graphs.inputs}) == len(graphs.inputs)
    before = [each._version for each in graphs.inputs]
    step(model, cache, torch.tensor([2, 3]))
    changed = [
        each.data_ptr()
        for each, version in zip(graphs.inputs, before, strict=True)
        if each._version > version
    ]
    stores = [store for layer in cache.slot_layers for store in {layer, *layer.stores}]
    fixed = {each.data_ptr() for store in stores for each in stationary(store)}
    clocks = {clock.data_ptr() for clock in cache.static._seen.values()}
    assert set(changed) <= fixed | clocks
    assert len(changed) >= 2 * model.config.num_hidden_layers  # keys and values of every layer


PADDED = [("h2o+caote", True), *((policy, i % 2 > 0) for i, policy in enumerate(STEADY[1:]))]
PADDED += [("full", False), *((policy, True) for policy in APPENDING[1:])]


@pytest.mark.parametrize("case", first(1, PADDED), ids=str)
def test_compiled_steps_equal_eager_ones_and_share_one_graph(case):
    """Which could be a CUDA graph, and serves another cache of the same kind."""
    policy, padded = case
    model, graphs = kvtool.attach(peaky_model("llama", head_dim=32)), Graphs()
    worst, step, _, cache = run_both(model, policy, padded, 64, 6, graphs)
    assert worst < 1e-4
    report, eager_steps = step.steps, 0 if policy in APPENDING else 1
    assert (report.eager_steps, report.compiled_steps) == (eager_steps, 6 - eager_steps)
    assert report.graphs == 1
    assert report.compile_s > 0
    check_can_be_a_cuda_graph(graphs, step, model, cache)
    _, again, *_ = run_both(model, policy, padded, 64, 3, graphs)
    assert (again.steps.graphs, again.steps.compiled_steps) == (0, 3 - eager_steps)


@pytest.mark.parametrize("policy", first(1, [*PACED, *APART]))
def test_steps_between_two_cuts_share_one_graph(policy):
    model, graphs = small(), Graphs()
    worst, step, _, cache = run_both(model, policy, True, 64, 20, graphs)
    assert worst < 1e-4
    report = replace(step.steps)  # before the steps of the check below
    if policy in PACED:  # not heads that are cut at times of their own
        assert report.graphs == 1
        assert report.compiled_steps >= 12
        check_can_be_a_cuda_graph(graphs, step, model, cache)
    assert 4 <= report.eager_steps == 20 - report.compiled_steps


@pytest.mark.parametrize("policy", first(1, READING))
def test_readers_share_one_graph_where_all_rows_are_as_long(policy):
    """And count what they look at in empty slots, as an eager step that has as many tokens."""
    model, graphs = small(), Graphs()
    worst, step, eager, compiled = run_both(model, policy, False, 9, 6, graphs)
    assert worst < 1e-4
    report = step.steps
    assert (report.compiled_steps, report.eager_steps, report.graphs) == (6, 0, 1)
    slots = compiled.slot_layers[0].slots.positions.shape[2]
    while eager.slot_layers[0].slots.used < slots:
        decode_step(model, eager, torch.tensor([2, 3]))
    assert compiled.report().traffic_pairs == eager.report().traffic_pairs
    check_can_be_a_cuda_graph(graphs, step, model, compiled)


@pytest.mark.parametrize("policy", first(1, READING[::-1]))
def test_readers_of_rows_of_other_lengths_share_one_graph(policy):
    """The short row is read in full first, and later chosen from."""
    model, graphs = small(), Graphs()
    worst, step, _, compiled = run_both(model, policy, True, 12, 9, graphs)
    assert worst < 1e-4
    report = step.steps
    assert (report.compiled_steps, report.eager_steps, report.graphs) == (9, 0, 1)
    check_can_be_a_cuda_graph(graphs, step, model, compiled)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "policy", "padded"),
    [
        *(("falcon", "snapkv(window=4)", True), ("gptj", "h2o", True)),
        *(("gemma3", "h2o+int8", False), ("gpt_oss", "h2o+caote", False)),
        *(("deepseek_v3", "snapkv(window=4)", False), ("falcon_h1", "h2o+caote", False)),
        *(("gemma3", "rocketkv", False), ("qwen3", "sparq", False)),
    ],
)
def test_families_compile_to_one_graph(name, policy, padded):
    model = kvtool.attach(family_model(name))
    worst, step, *_ = run_both(model, policy, padded, room=64, steps=4)
    assert worst < 1e-4
    assert step.steps.graphs == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["adakv(window=4)", "full", "rocketkv"])
def test_a_turn_gives_up_the_room_and_later_steps_take_another(policy):
    model = small()
    *_, eager, compiled = run_both(model, policy, False, room=50, steps=3)
    before = [weakref.ref(store.slots.keys) for store in compiled.slot_layers[0].stores]
    more = random_ids(40, seed=3, batch=2)
    torch.testing.assert_close(prefill(model, compiled, more), prefill(model, eager, more))
    gc.collect()
    assert [each() for each in before] == [None] * len(before)
    step, held = StaticDecoding(model, 9, backend="eager", compiled=True), []
    for i in range(4):
        token = torch.tensor([i + 2, i + 3])
        logits = step(model, compiled, token)
        torch.testing.assert_close(logits, decode_step(model, eager, token))
        held.append([store.slots.used for layer in compiled.slot_layers for store in layer.stores])
    assert held == held[:1] * 4


def test_room_for_a_long_text_is_taken_in_parts(monkeypatch):
    model = small()
    cache = filled(model, "snapkv(window=4)")
    monkeypatch.setattr(StaticDecoding, "_step", lambda *_: None)  # nothing is compiled
    StaticDecoding(model, 10**6, backend="eager", compiled=True)(model, cache, torch.tensor([2, 3]))
    assert cache.layers[0].slots.used == 20 + 2048


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["full+int8", "snapkv(window=4)+int4", "rocketkv"])
def test_few_graphs_serve_all_rooms(policy):
    model = small(head_dim=32)
    cache = filled(model, policy)
    step = StaticDecoding(model, 2, backend="eager", compiled=True)
    for i in range(16):
        step(model, cache, torch.tensor([i + 2, i + 3]))
    report = step.steps
    assert (report.compiled_steps, report.eager_steps) == (16, 0)
    assert report.graphs <= 3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "policy", "padded"),
    [
        *(("llama", "full", True), ("llama", "adakv(window=4)", True)),
        *(("llama", "rocketkv", False), ("falcon", "full", True)),
    ],
)
def test_steps_outside_go_on_when_the_room_is_used_up(name, policy, padded):
    model = small() if name == "llama" else kvtool.attach(family_model(name))
    *_, eager, compiled = run_both(model, policy, padded, room=5, steps=5)
    for i in range(4):
        token = torch.tensor([i + 2, i + 3])
        logits = decode_step(model, compiled, token)
        torch.testing.assert_close(logits, decode_step(model, eager, token))
    check_same(eager, compiled)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("policy", "padded"), [("h2o+caote", True), ("snapkv(window=4)", True), ("rocketkv", False)]
)
def test_steps_inside_and_outside_take_turns(policy, padded):
    model = small()
    eager, mixed = filled(model, policy, padded), filled(model, policy, padded)
    step = StaticDecoding(model, 9, backend="eager", compiled=True)
    for i in range(12):
        token = torch.tensor([i + 2, i + 3])
        take = decode_step if i % 3 == 2 else step
        torch.testing.assert_close(take(model, mixed, token), decode_step(model, eager, token))


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["h2o+caote", "rocketkv"])
def test_a_copy_and_a_cache_gone_back_to_are_not_touched(policy):
    model = small()
    cache = filled(model, policy)
    step = StaticDecoding(model, 9, backend="eager", compiled=True)
    token = torch.tensor([2, 3])
    for _ in range(3):
        step(model, cache, token)
    held, other = cache.kept_positions(0), cache.copy()
    with cache.rollback():
        inside = [step(model, cache, token) for _ in range(3)]
    assert torch.equal(cache.kept_positions(0), held)
    after = [step(model, cache, token) for _ in range(3)]
    torch.testing.assert_close(after, inside)
    assert torch.equal(other.kept_positions(0), held)
    torch.testing.assert_close(decode_step(model, other, token), inside[0])


@pytest.mark.exhaustive
@torch._dynamo.config.patch(recompile_limit=2)
def test_many_kinds_of_caches_are_compiled_one_after_another():
    model = small()
    for policy in ("h2o", "tova", "streaming", "h2o"):
        worst, step, *_ = run_both(model, policy, False, 9, 4)
        assert worst < 1e-4
        assert (step.steps.graphs, step.steps.compiled_steps) == (1, 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["adakv(window=4)", "d2o+uniform", "rocketkv"])
def test_a_saved_cache_holds_no_empty_room_and_goes_on_compiled(tmp_path, policy):
    model = small()
    *_, eager, compiled = run_both(model, policy, False, room=30, steps=5)
    for name, cache in (("eager", eager), ("cache", compiled)):
        kvtool.save_cache(cache, tmp_path / name, model=model)
    assert (tmp_path / "eager").stat().st_size == (tmp_path / "cache").stat().st_size
    torch._dynamo.reset()
    loaded = kvtool.load_cache(tmp_path / "cache", model)
    step = StaticDecoding(model, 9, backend="eager", compiled=True)
    for i in range(5):
        token = torch.tensor([i + 2, i + 3])
        logits = step(model, loaded, token)
        torch.testing.assert_close(logits, decode_step(model, eager, token), atol=1e-4, rtol=0)
    assert step.steps.compiled_steps >= 4


@dataclass(frozen=True)
class Asking(Recency):
    """Looks at the device in every step, as no policy of ours does."""

    def importance(self, state, view, rows):
        if view.positions.max().item() < 0:
            raise AssertionError
        return view.positions.float()


def lacking(module, inputs):
    raise InvalidCxxCompiler


@pytest.mark.parametrize(
    ("policy", "backend", "told"),
    [
        (Policy(Asking()), "eager", "Asking` on `llama` cannot be compiled"),
        ("h2o", lacking, r"cannot be compiled: no working C\+\+ compiler"),
    ],
    ids=["policy", "machine"],
)
def test_what_cannot_be_compiled_says_so(policy, backend, told):
    model = small()
    cache = filled(model, policy)
    step = StaticDecoding(model, 8, backend=backend, compiled=True)
    step(model, cache, torch.tensor([2, 3]))
    with pytest.raises(KvtoolError, match=told):
        step(model, cache, torch.tensor([2, 3]))


def test_a_step_that_cannot_begin_leaves_the_cache_as_it_was(monkeypatch):
    model = kvtool.attach(peaky_model("llama"))
    cache = filled(model, "h2o")
    step = StaticDecoding(model, 8, backend="eager", compiled=True)
    step(model, cache, torch.tensor([2, 3]))
    last, held = cache.slot_layers[-1], cache.kept_positions(0)

    def copy_on_write(slots):
        if slots is last.slots:
            raise MemoryError

    monkeypatch.setattr(SlotBuffers, "copy_on_write", copy_on_write)
    with pytest.raises(MemoryError):
        step(model, cache, torch.tensor([2, 3]))
    assert cache.tokens_seen() == [61, 61]
    assert torch.equal(cache.kept_positions(0), held)


def test_what_cannot_be_compiled_and_need_not_runs_as_it_is():
    model = small()
    eager, cache = (filled(model, Policy(Asking())) for _ in range(2))
    step = StaticDecoding(model, 8, backend="eager", required=False, compiled=True)
    for i in range(4):
        token = torch.tensor([i + 2, i + 3])
        assert torch.equal(step(model, cache, token), decode_step(model, eager, token))
    assert (step.steps.compiled_steps, step.steps.eager_steps) == (0, 4)


def test_compiling_pays_for_long_runs_on_one_cuda_device():
    def model(device, *parts):
        return SimpleNamespace(device=torch.device(device), hf_device_map=dict(enumerate(parts)))

    assert pays(model("cuda"), 2000)
    assert not pays(model("cuda"), 1000)
    assert not pays(model("cuda", 0, 1), 2000)
    split = SimpleNamespace(device=torch.device("cuda"), tp_size=2)
    assert not pays(split, 2000)
    assert not pays(model("cpu"), 2000)


TWICE = """
import torch
from torch._dynamo.utils import counters
import kvtool
from kvtool.generation import prefill
from kvtool.generation.graphs import StaticDecoding
from tests.models_for_tests import peaky_model, random_ids

model = kvtool.attach(peaky_model("llama", num_hidden_layers=1))
cache = kvtool.build_cache(model, "h2o", 16)
prefill(model, cache, random_ids(40))
step = StaticDecoding(model, 4, compiled=True)
for token in range(4):
    step(model, cache, torch.tensor([token]))
assert step.steps.compiled_steps >= 2
print(sum(counters["inductor"][name] for name in ("fxgraph_cache_miss", "fxgraph_cache_bypass")))
"""


@pytest.mark.exhaustive
def test_a_second_process_finds_what_the_first_has_compiled(tmp_path):
    environment = {
        name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"
    } | {"XDG_CACHE_HOME": str(tmp_path)}
    missed = []
    for _ in range(2):
        command = [sys.executable, "-c", TWICE]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        missed.append(int(done.stdout))
    assert missed == [1, 0]
    assert any((tmp_path / "kvtool" / "compiled").iterdir())


def test_a_place_that_the_user_chose_for_compiled_code_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _keep_compiled()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    _keep_compiled()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "kvtool" / "compiled")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{gettempdir()}/torchinductor_me")
    _keep_compiled()  # nothing can be written there
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{gettempdir()}/torchinductor_me"


def test_the_command_says_when_nothing_was_compiled(capsys):
    assert main(["generate", "-p", "h2o+calidrop", "-b", "128", "-n", "4", "--compile"]) == 0
    expected = "none of 3 steps ran compiled: their shapes change, or they cannot be compiled"
    assert expected in capsys.readouterr().err


def test_what_asks_the_host_is_left_as_it_is():
    worst, step, *_ = run_both(small(), "h2o+calidrop", False, room=8, steps=4)
    assert (worst, step.steps.compiled_steps, step.steps.eager_steps) == (0.0, 0, 4)


@pytest.mark.exhaustive
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
    assert compiled["compiled"]["graphs"] == 1
    assert compiled["compiled"]["cuda_graphs"] is False
    assert f"{steps - 1} of {steps} steps ran compiled" in captured.err
