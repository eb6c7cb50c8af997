"""Which process measures what, and how their lines come together."""

import json

import pytest

from kvtool.errors import UsageError
from kvtool.evaluation.run.index import partition_of
from kvtool.evaluation.run.runner import Measurement
from kvtool.evaluation.run.store import Store


def measurements(works, variants=3):
    return [Measurement(0, i, a, work) for i, work in enumerate(works) for a in range(variants)]


def test_every_measurement_has_one_process_and_work_is_equal():
    for processes in [1, 2, 3, 7, 8]:
        for works in [[5] * 11, [1, 9, 2, 40, 3, 3, 17], [7]]:
            whole = measurements(works)
            shares = [partition_of(whole, process, processes) for process in range(processes)]
            assert [each for share in shares for each in share] == whole
            each = sum(3 * work for work in works) / processes
            for share in shares:
                assert abs(sum(one.work for one in share) - each) <= max(works)


def test_samples_are_split_at_the_cuts_only():
    shares = [partition_of(measurements([4] * 10), process, 4) for process in range(4)]
    homes = [{one.sample for one in share} for share in shares]
    shared = [sample for sample in range(10) if sum(sample in home for home in homes) > 1]
    assert len(shared) <= 3


def test_nothing_left_is_nothing_for_everybody():
    assert partition_of([], 1, 2) == []


def record(key: str, **more) -> dict:
    """A line about a sample that failed, which says least."""
    return {"key": key, "configuration": "c", "id": key, "error": "it broke", **more}


def test_lines_of_processes_are_read_where_they_are_and_then_put_together(tmp_path):
    first, second = Store(tmp_path), Store(tmp_path, 1)
    first.append("h2o", "suite/task", record("a", n=1))
    second.append("h2o", "suite/task", record("a", n=2))
    second.append("h2o", "other", record("b"))
    with second.path("h2o", "other").open("a") as file:
        file.write('{"key": "c", "unfin')
    second.write("results.json", "never")
    assert not (tmp_path / "results.json").exists()
    assert first.records("h2o", "suite/task") == {"a": record("a", n=2)}
    assert set(first.records("h2o", "other")) == {"b"}
    first.repair()
    assert not (tmp_path / "parts").exists()
    lines = (tmp_path / "samples/h2o/suite/task.jsonl").read_text().splitlines()
    assert [json.loads(line)["n"] for line in lines] == [1, 2]
    (line,) = (tmp_path / "samples/h2o/other.jsonl").read_text().splitlines()
    assert json.loads(line) == record("b")


def test_a_process_that_still_runs_is_left_alone(tmp_path):
    first, second = Store(tmp_path), Store(tmp_path, 1)
    with second.locked():
        second.append("h2o", "niah", record("a"))
        for act in (first.repair, first.clear):
            with pytest.raises(UsageError, match="another run is writing to"):
                act()
        second.append("h2o", "niah", record("b"))
    first.repair()
    assert set(first.records("h2o", "niah")) == {"a", "b"}


def test_a_silent_process_writes_nothing(tmp_path):
    store = Store(tmp_path / "run", 1, silent=True)
    with store.locked():
        store.append("h2o", "niah", {"key": "a"})
        store.write("results.json", "text")
    assert not (tmp_path / "run").exists()
