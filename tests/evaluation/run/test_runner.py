"""A run: what is measured, written and skipped."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from kvtool.documents.settings import Protocol
from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.run.index import unfinished
from kvtool.evaluation.run.runner import Place, draw_jobs, run_measurements
from kvtool.evaluation.run.store import Store
from kvtool.evaluation.samples.sample import token_counter
from tests.evaluation.echo import Echo
from tests.evaluation.variants import make_variants

VARIANTS = make_variants(["streaming"], ["8", "16"])  # and the full cache
PLACE = Place({"id": "reference"}, Protocol())


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "run")


@pytest.fixture(scope="module")
def jobs(counter):
    return draw_jobs([Echo(name="echo")], counter, None)


@pytest.fixture(scope="module")
def finished(loaded, jobs, tmp_path_factory):
    """The folder of a run with all of its lines."""
    store = Store(tmp_path_factory.mktemp("finished"))
    assert missing(jobs, PLACE, store) == 9
    assert len(run(jobs, loaded, store)) == 9
    return store.folder


@pytest.fixture
def done(finished, tmp_path):
    """A copy of the finished run, to be changed."""
    return Store(shutil.copytree(finished, tmp_path / "done"))


def lines(store, variant, task="echo"):
    return [json.loads(line) for line in store.path(variant.folder, task).read_text().splitlines()]


def run(jobs, loaded, store, place=PLACE, **more):
    return [step.task for step in steps(jobs, loaded, store, place, **more)]


def steps(jobs, loaded, store, place=PLACE, **more):
    left = unfinished(jobs, VARIANTS, place, store)
    return run_measurements(left, jobs, VARIANTS, loaded, place, store, **more)


def missing(jobs, place, store):
    return len(unfinished(jobs, VARIANTS, place, store))


def test_every_sample_runs_under_every_variant_once(loaded, jobs, done):
    for variant in VARIANTS:
        assert [record["id"] for record in lines(done, variant)] == ["one", "two", "three"]
    assert lines(done, VARIANTS[1])[0]["kept"] == 8
    assert lines(done, VARIANTS[0])[0]["kept"] > 16
    assert missing(jobs, PLACE, done) == 0
    assert run(jobs, loaded, done) == []


def test_more_samples_and_other_settings_keep_what_is_there(loaded, counter, jobs, store):
    run(draw_jobs([Echo(name="echo")], counter, 1), loaded, store)
    more = draw_jobs([Echo(name="echo", texts=("zero", "one", "two"))], counter, None)
    assert missing(more, PLACE, store) == 9  # `texts` is a setting like any other
    assert len(run(jobs, loaded, store)) == 6
    assert [record["id"] for record in lines(store, VARIANTS[0])] == ["one", "two", "three"]


def test_another_model_or_protocol_is_another_measurement(jobs, done):
    for place in (
        Place({"id": "another"}, Protocol()),
        Place({"id": "reference"}, Protocol(temperature=0.5)),
        Place({"id": "reference"}, Protocol(query_aware=False)),
    ):
        assert missing(jobs, place, done) == 9


def test_a_failing_sample_is_recorded_and_tried_again(loaded, counter, store):
    bad = draw_jobs([Echo(name="echo", bad="two")], counter, None)
    done = list(steps(bad, loaded, store))
    assert sum(step.error is not None for step in done) == len(VARIANTS)
    failed = lines(store, VARIANTS[0])[1]
    assert (failed["id"], failed["error"]) == ("two", "ValueError: this one is bad")
    assert missing(bad, PLACE, store) == 3
    shown = [step.shown for step in done if step.error is not None]
    assert shown[0] == "echo, sample two, full: ValueError: this one is bad"


def test_a_number_that_json_cannot_hold_fails_its_sample_only(loaded, counter, store):
    class Overflowing(Echo):
        def score(self, record):
            return {"kept": {8: float("nan"), 16: float("inf")}.get(record["kept"], 1.0)}

    jobs = draw_jobs([Overflowing(name="echo")], counter, 1)
    errors = {step.variant: step.error for step in steps(jobs, loaded, store)}
    assert errors.pop("full") is None
    assert list(errors) == ["streaming@8", "streaming@16"]
    for error in errors.values():
        assert error.startswith("a score or measurement is not a finite number")
    assert missing(jobs, PLACE, store) == 2


def test_a_warm_up_that_fails_leaves_the_error_to_the_samples(loaded, counter, store, monkeypatch):
    def no_room(self):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("kvtool.evaluation.bench.bench.Bench.new_cache", no_room)
    jobs = draw_jobs([Echo(name="echo")], counter, 1)
    errors = [step.error for step in steps(jobs, loaded, store)]
    assert errors == ["RuntimeError: out of memory"] * len(VARIANTS)


def test_an_unfinished_last_line_is_measured_again(loaded, jobs, done):
    path = done.path(VARIANTS[0].folder, "echo")
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert missing(jobs, PLACE, done) == 1
    done.repair()
    assert run(jobs, loaded, done) == ["echo"]
    before, after = whole.splitlines(), path.read_bytes().splitlines()
    assert before[:2] == after[:2]
    assert json.loads(before[2])["key"] == json.loads(after[2])["key"]


def test_a_damaged_line_is_named(jobs, done):
    path = done.path(VARIANTS[0].folder, "echo")
    first, rest = path.read_text().split("\n", 1)
    path.write_text(f"{first[:30]}\n{rest}")
    with pytest.raises(KvtoolError, match=r"echo.jsonl:1 is not a record"):
        missing(jobs, PLACE, done)


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
        with pytest.raises(UsageError, match="another run"), Store(store.folder).locked():
            pass  # nor twice in one process
    with store.locked():
        pass
