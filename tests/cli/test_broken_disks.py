"""Disks that fill up, folders that go, runs that were killed while they wrote their first file."""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtool.documents.results import ResultsDocument
from kvtool.evaluation.run.store import Store

RUN = ("eval", "-q", "-t", "niah", "--lengths", "192", "--depths", "2", "--no-plots", "-f", "json")
HALF = ".recipe.lock.yaml.x3k9_abc.part"
HELD = ("-p", "streaming", "-b", "32", "-o", "run")


def names(folder="."):
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("left", "flags"), [([HALF], ()), ([HALF, "parts/1/.lock"], ("--overwrite",))]
)
def test_a_run_killed_in_its_first_write_is_begun_anew(kvtool, left, flags):
    for path in (Path("run", name) for name in (".lock", *left)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("kind: rec")
    done = kvtool(*RUN, *HELD, *flags)
    assert (done.code, done.err) == (0, "")
    assert ResultsDocument(**json.loads(done.out)).complete
    assert not [name for name in names("run") if name.endswith(".part")]


def test_a_folder_with_another_file_is_no_fresh_run(kvtool):
    Path("run").mkdir()
    for name in (".lock", HALF, ".thesis.txt.x3k9_abc.part"):
        Path("run", name).write_text("")
    done = kvtool(*RUN, *HELD)
    assert done.code == 2
    assert "error: folder `run` holds other files, no run" in done.err
    assert len(names("run")) == 3


@contextmanager
def after_the_first(act):
    """Do something once the first sample is written."""
    append = Store.append
    done = []

    def appended(store, *record):
        append(store, *record)
        if not done:
            done.append(act())

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Store, "append", appended)
        yield


@pytest.mark.parametrize("anew", [False, True])
def test_a_folder_deleted_while_running_is_an_error(kvtool, anew):
    def delete():
        shutil.rmtree("run")
        if anew:
            Path("run").mkdir()
            Path("run", ".lock").write_text("")

    with after_the_first(delete):
        done = kvtool(*RUN, *HELD)
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: folder `run` was deleted while the run was writing to it\n"
    assert not Path("run", "samples").exists()


@pytest.mark.exhaustive
def test_a_run_whose_samples_went_is_not_a_success(kvtool):
    with after_the_first(lambda: shutil.rmtree("run/samples")):
        done = kvtool(*RUN, *HELD)
    assert done.code == 1
    assert not json.loads(done.out)["complete"]
    assert "error: the run is not complete: samples are missing in its folder" in done.err
    again = kvtool("eval", "-q", "--no-plots", "--rescore", "run")
    assert again.code == 1
    whole = kvtool(*RUN, *HELD)
    assert (whole.code, json.loads(whole.out)["complete"]) == (0, True)


@pytest.mark.exhaustive
def test_a_disk_that_fills_up_during_a_run_is_told_in_a_line(kvtool, full_disk):
    measured = []
    append = Store.append

    def appended(store, *record):
        measured.append(record)
        with full_disk(16):
            append(store, *record)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Store, "append", appended)
        done = kvtool(*RUN, *HELD)
    assert (done.code, done.out, len(measured)) == (1, "", 1)
    assert done.err == "error: cannot write `run/samples/full/niah.jsonl`: File too large\n"
    whole = kvtool(*RUN, *HELD)
    assert (whole.code, json.loads(whole.out)["complete"]) == (0, True)


def test_a_disk_too_full_for_key_bases_keeps_the_old_ones(kvtool, full_disk):
    command = ("profile", "-q", "--tokens", "64", "--samples", "1", "--metrics", "key_basis")
    assert kvtool(*command, "-o", "a.yaml").code == 0
    before = Path("a.heads.safetensors").read_bytes()
    with full_disk(2048):
        done = kvtool(*command, "-o", "a.yaml")
    assert done.code == 1
    path = Path("a.heads.safetensors").absolute()
    assert done.err == f"error: cannot write `{path}`: File too large\n"
    assert path.read_bytes() == before
    assert names() == ["a.heads.safetensors", "a.yaml"]


LONG = "n" * 256


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "-o", "/dev/full"),
        ("generate", "--cache", LONG),
        ("generate", "--prompt-file", LONG),
        ("compress", "-p", "h2o", "--prompt", "a", "--save", f"{LONG}/a.st"),
        ("profile", "-o", f"{LONG}.yaml"),
        ("plan-budget", "-b", "64", "--context", "1K", "-o", f"{LONG}.yaml"),
        (*RUN, "-p", "h2o", "-o", LONG),
        (*RUN, "-p", "h2o", "-b", "6" * 200 + "%", "-o", "run"),
    ],
    ids=lambda arguments: " ".join(argument[:12] for argument in arguments),
)
def test_what_cannot_be_written_is_refused_before_the_model_loads(kvtool, monkeypatch, arguments):
    def load(*unused, **options):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("kvtool.models.attached.load", load)
    done = kvtool(*arguments)
    assert (done.code, done.out) == (2, ""), done.err
    assert len([line for line in done.err.splitlines() if line.startswith("error: ")]) == 1
    assert names() == []
