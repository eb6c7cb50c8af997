"""`kvtool eval` in several processes: one run, shared, as a single process would have made it."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtool.documents.results import ResultsDocument
from tests.launch import finish, launch

QUICK = ("eval", "-t", "niah,fidelity", "--lengths", "256", "--no-plots", "-f", "json")
RUN = (*QUICK, "--limit", "3", "-p", "streaming,h2o+caote", "-b", "32")
LOST = "another process has ended before its work was done"


def scores(text: str) -> list:
    results = ResultsDocument(**json.loads(text))
    assert results.complete
    return [
        (r.variant, r.task, r.value, r.n, r.stderr, r.delta, r.cells, r.metrics, r.cost.kv_bytes)
        for r in results.results
    ]


def keys(folder: Path) -> list[str]:
    files = sorted(folder.rglob("*.jsonl"))
    return [json.loads(line)["key"] for file in files for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The folder of a run by one process, with what it printed beside it."""
    folder = tmp_path_factory.mktemp("alone")
    program = [sys.executable, "-m", "kvtool", *RUN, "-q", "-o", "run"]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (folder / "printed.json").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def printed(alone) -> str:
    return (alone / "printed.json").read_text()


@pytest.mark.exhaustive
def test_two_processes_of_torchrun_give_the_results_of_one(alone, printed, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [*torchrun, "-m", "kvtool", *RUN, "-o", "run"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert scores(done.stdout) == scores(printed)
    assert scores((tmp_path / "run/results.json").read_text()) == scores(printed)
    assert sorted(keys(tmp_path / "run")) == sorted(keys(alone / "run"))
    assert done.stderr.count("model: reference") == 1
    assert f"2 processes share {len(keys(alone / 'run'))} measurements, " in done.stderr
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {
        ".lock", "recipe.lock.yaml", "report.html", "results.json", "samples", "samples.json"
    }  # fmt: skip


@pytest.mark.exhaustive
def test_a_killed_process_loses_its_running_sample_and_the_run_goes_on(
    alone, printed, shipped_model, kvtool, tmp_path
):
    program = ("-m", "kvtool", *RUN, "-q", "-o", "run")
    processes = launch(2, *program, folder=tmp_path)
    part = tmp_path / "run" / "parts" / "1"
    while sum(len(path.read_text().splitlines()) for path in part.rglob("*.jsonl")) < 3:
        assert processes[1].poll() is None, "it ended before it was killed"
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGKILL)
    (code, out, err), (killed, _, _) = finish(processes)
    assert (code, out, killed) == (1, "", -signal.SIGKILL)
    assert err.startswith(f"error: {LOST}\n")
    assert (part / "samples").is_dir()
    kept, of_first = set(keys(tmp_path / "run")), set(keys(tmp_path / "run" / "samples"))
    assert len(kept) < len(keys(alone / "run"))
    state = ResultsDocument(**json.loads((tmp_path / "run/results.json").read_text()))
    assert not state.complete
    # it is written when the first process has ended its share, maybe before the other was killed
    assert len(of_first) <= sum(result.n for result in state.results) <= len(kept)

    shutil.copytree(tmp_path / "run", tmp_path / "other")
    three = finish(launch(3, "-m", "kvtool", *RUN, "-o", "run", folder=tmp_path))
    assert [(code, bool(out)) for code, out, _ in three] == [(0, True), (0, False), (0, False)]
    assert f"resumed {len(kept)}/{len(keys(alone / 'run'))} in run\n" in three[0][2]
    assert (three[1][2], three[2][2]) == ("", "")
    single = kvtool(*RUN, "-o", "other")
    for folder, out in (("run", three[0][1]), ("other", single.out)):
        assert scores(out) == scores(printed)
        assert sorted(keys(tmp_path / folder)) == sorted(keys(alone / "run"))  # each once


@pytest.mark.exhaustive
def test_exit_codes_agree(alone, tmp_path):
    shutil.copytree(alone / "run", tmp_path / "run")
    again = ("-m", "kvtool", "eval", "--rescore", "run", "-q", "--no-plots", "-f", "json")
    ends = finish(launch(2, *again, "--fail-under", "niah=0.9", folder=tmp_path))
    assert [(code, bool(out)) for code, out, _ in ends] == [(3, True), (3, False)]


@pytest.mark.exhaustive
def test_failing_samples_of_any_process_are_counted(tmp_path):
    # a quarter of a short prompt is less than what streaming(sinks=60) always keeps
    run = ("eval", "-t", "niah", "--lengths", "1K,128", "--depths", "1", "-b", "25%")
    run = ("-m", "kvtool", *run, "-p", "streaming(sinks=60)", "-o", "run", "--no-plots")
    ends = finish(launch(2, *run, folder=tmp_path))
    assert [code for code, _, _ in ends] == [4, 4]
    assert "failed samples: 1; `error` in run/samples says why\n" in ends[0][2]


@pytest.mark.exhaustive
def test_what_the_first_process_refuses_ends_them_all(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("keep")
    ends = finish(launch(2, "-m", "kvtool", *RUN, "-o", "run", folder=tmp_path))
    assert [(code, out) for code, out, _ in ends] == [(2, ""), (2, "")]
    assert "error: folder `run` holds other files, no run" in ends[0][2]
    assert ends[1][2] == "process 1: error: process 0 has failed\n"
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name != ".lock"] == [
        "mine.txt"
    ]


def test_a_place_to_meet_is_needed(kvtool, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = kvtool(*RUN, "-o", "run")
    assert done.code == 2
    assert "error: 2 processes, and nothing says where they meet (MASTER_ADDR, MASTER_PORT)\n" in (
        done.err
    )


def test_a_rank_beyond_the_group_is_refused(kvtool, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = kvtool("policies")
    assert done.code == 2
    assert "the environment names no process of a group: RANK=2 WORLD_SIZE=2\n" in done.err
