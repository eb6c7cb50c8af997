"""A run: what is measured, written and skipped."""

import json
import os
import subprocess
import sys
from typing import ClassVar

import pytest

from kvtool.documents.settings import Protocol
from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.run.index import unfinished
from kvtool.evaluation.run.runner import Place, draw_jobs, run_measurements
from kvtool.evaluation.run.store import Store
from kvtool.evaluation.samples.sample import token_counter
from tests.evaluation.echo import Echo
from tests.evaluation.variants import make_variants

ARMS = make_variants(["streaming", "h2o"], ["8", "16"])
PLACE = Place({"id": "reference"}, Protocol())


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "run")


def lines(store, arm, task="echo"):
    return [json.loads(line) for line in store.path(arm.folder, task).read_text().splitlines()]


def run(jobs, loaded, store, place=PLACE, **more):
    return [step.task for step in steps(jobs, loaded, store, place, **more)]


def steps(jobs, loaded, store, place=PLACE, **more):
    left = unfinished(jobs, ARMS, place, store)
    return run_measurements(left, jobs, ARMS, loaded, place, store, **more)


def missing(jobs, place, store):
    return len(unfinished(jobs, ARMS, place, store))


def test_every_sample_runs_under_every_arm_once(loaded, counter, store):
    jobs = draw_jobs([Echo(name="echo")], counter, None)
    assert missing(jobs, PLACE, store) == 15
    assert len(run(jobs, loaded, store)) == 15
    for arm in ARMS:
        assert [record["id"] for record in lines(store, arm)] == ["one", "two", "three"]
    assert lines(store, ARMS[1])[0]["kept"] == 8
    assert lines(store, ARMS[0])[0]["kept"] > 16
    assert missing(jobs, PLACE, store) == 0
    assert run(jobs, loaded, store) == []


def test_more_samples_and_other_lengths_keep_what_is_there(loaded, counter, store):
    run(draw_jobs([Echo(name="echo")], counter, 1), loaded, store)
    more = draw_jobs([Echo(name="echo", texts=("zero", "one", "two"))], counter, None)
    assert missing(more, PLACE, store) == 15  # `texts` is a setting like any other
    run(draw_jobs([Echo(name="echo")], counter, None), loaded, store)
    assert [record["id"] for record in lines(store, ARMS[0])] == ["one", "two", "three"]


@pytest.mark.parametrize(
    "place",
    [
        Place({"id": "another"}, Protocol()),
        Place({"id": "reference"}, Protocol(temperature=0.5)),
        Place({"id": "reference"}, Protocol(query_aware=False)),
    ],
)
def test_another_model_or_protocol_is_another_measurement(loaded, counter, store, place):
    jobs = draw_jobs([Echo(name="echo")], counter, None)
    run(jobs, loaded, store)
    assert missing(jobs, place, store) == 15


def test_another_version_of_a_task_is_another_measurement(loaded, counter, store):
    class Newer(Echo):
        version: ClassVar[int] = 2

    run(draw_jobs([Echo(name="echo")], counter, None), loaded, store)
    assert missing(draw_jobs([Newer(name="echo")], counter, None), PLACE, store) == 15


def test_a_failing_sample_is_recorded_and_tried_again(loaded, counter, store):
    bad = draw_jobs([Echo(name="echo", bad="two")], counter, None)
    done = list(steps(bad, loaded, store))
    assert sum(step.error is not None for step in done) == len(ARMS)
    failed = lines(store, ARMS[0])[1]
    assert (failed["id"], failed["error"]) == ("two", "ValueError: this one is bad")
    assert missing(bad, PLACE, store) == 5
    with pytest.raises(KvtoolError, match="echo, sample two, full: ValueError"):
        run(bad, loaded, store, stop_on_error=True)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_json_cannot_hold_fails_its_sample_only(loaded, counter, store, number):
    class Overflowing(Echo):
        def score(self, record):
            return {"kept": number if record["kept"] == 8 else 1.0}

    jobs = draw_jobs([Overflowing(name="echo")], counter, None)
    errors = {step.variant: step.error for step in steps(jobs, loaded, store)}
    assert errors["full"] is None
    assert errors["streaming@8"].startswith("a score or measurement is not a finite number")
    assert missing(jobs, PLACE, store) == 6


def test_a_warm_up_that_fails_leaves_the_error_to_the_samples(loaded, counter, store, monkeypatch):
    def no_room(self):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("kvtool.evaluation.bench.bench.Bench.new_cache", no_room)
    jobs = draw_jobs([Echo(name="echo")], counter, 1)
    errors = [step.error for step in steps(jobs, loaded, store)]
    assert errors == ["RuntimeError: out of memory"] * len(ARMS)


def test_an_unfinished_last_line_is_measured_again(loaded, counter, store):
    jobs = draw_jobs([Echo(name="echo")], counter, None)
    run(jobs, loaded, store)
    path = store.path(ARMS[0].folder, "echo")
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert missing(jobs, PLACE, store) == 1
    store.repair()
    assert run(jobs, loaded, store) == ["echo"]
    before, after = whole.splitlines(), path.read_bytes().splitlines()
    assert before[:2] == after[:2]
    assert json.loads(before[2])["key"] == json.loads(after[2])["key"]


def test_a_damaged_line_is_named(loaded, counter, store):
    jobs = draw_jobs([Echo(name="echo")], counter, None)
    run(jobs, loaded, store)
    path = store.path(ARMS[0].folder, "echo")
    first, rest = path.read_text().split("\n", 1)
    path.write_text(f"{first[:30]}\n{rest}")
    with pytest.raises(KvtoolError, match=r"echo.jsonl:1 is not a record"):
        missing(jobs, PLACE, store)


def test_no_more_samples_are_drawn_than_are_wanted(counter):
    class Long(Echo):
        def draw(self, tokens):
            yield from super().draw(tokens)
            raise AssertionError("drew on")

    assert len(draw_jobs([Long(name="echo")], counter, 3)[0].samples) == 3


def test_what_gives_no_samples_or_twice_the_same_is_refused(counter):
    with pytest.raises(UsageError, match="echo: no samples"):
        draw_jobs([Echo(name="echo", texts=())], counter, None)
    with pytest.raises(KvtoolError, match="two samples are called `one`"):
        draw_jobs([Echo(name="echo", texts=("one", "two", "one"))], counter, None)
    with pytest.raises(UsageError, match="task `echo` is given twice"):
        draw_jobs([Echo(name="echo"), Echo(name="echo", bad="x")], counter, None)


def test_lengths_beyond_the_model_are_refused(loaded):
    from kvtool.evaluation.tasks.niah import Needle

    short = token_counter(loaded.tokenizer, 1000)
    with pytest.raises(UsageError, match="2048 tokens are more than the 1000 positions"):
        draw_jobs([Needle(name="niah", lengths="512,2K")], short, None)


def test_the_lock_of_a_killed_run_is_free(tmp_path):
    code = "import sys, time; from pathlib import Path\n"
    code += "from kvtool.evaluation.run.store import Store\n"
    code += "with Store(Path(sys.argv[1])).locked(): print('held', flush=True); time.sleep(99)"
    command = [sys.executable, "-c", code, tmp_path / "run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        store = Store(tmp_path / "run")
        with pytest.raises(UsageError, match="another run is writing"), store.locked():
            pass
        holder.kill()
    with store.locked():
        assert os.listdir(store.folder) == [".lock"]


def test_one_run_at_a_time_holds_a_folder(store):
    with store.locked(), pytest.raises(UsageError, match="another run is writing"):  # noqa: SIM117
        with Store(store.folder).locked():
            pass
    with store.locked():
        pass
