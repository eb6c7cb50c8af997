"""Files made by the code of 2026-11-22 are read by today's, which goes on as that code did."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

import kvtool
from kvtool.cli.main import main
from kvtool.documents.claim import Claim
from kvtool.documents.results import ResultsDocument
from kvtool.models.load import load
from tests.old_files.make import CACHES, DATA, EVAL, go_on, make_cache, tensors

pytestmark = pytest.mark.few(2)

EXPECTED = json.loads((DATA / "expected.json").read_text())
MOVING = ("started", "finished", "git_commit", "argv", "environment", "kvtool", "name")
RENAMED = {"arm": "variant", "arms": "variants"}
NEW = ("samples", "differences", "pairs")  # beside the results; what the older files lack


def close(found: dict[str, list], expected: dict[str, list]) -> None:
    """Tensors of the same names, dtypes and shapes, and nearly the same magnitudes."""
    assert {name: about[:2] for name, about in found.items()} == {
        name: about[:2] for name, about in expected.items()
    }
    for name, (_, _, size) in expected.items():
        assert found[name][2] == pytest.approx(size, rel=1e-3, abs=1e-2), name


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CACHES)
def test_a_saved_cache_goes_on_as_it_did(name, tmp_path):
    found = go_on(DATA / f"{name}.safetensors", tmp_path)
    for what, expected in EXPECTED[name].items():
        close(found[what].pop("tensors"), expected.pop("tensors"))
        assert found[what] == expected, what


@pytest.mark.parametrize("name", CACHES)
def test_a_saved_cache_is_saved_again_as_it_was(name, tmp_path):
    before, after = DATA / f"{name}.safetensors", tmp_path / "again.safetensors"
    model = kvtool.attach(load().model)
    kvtool.save_cache(kvtool.load_cache(before, model), after, model_name="reference")
    old, new = load_file(before), load_file(after)
    assert old.keys() == new.keys()
    for key, tensor in old.items():
        torch.testing.assert_close(new[key], tensor, rtol=0, atol=0, msg=key)
    assert labels(after) == labels(before)


def labels(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        said = file.metadata()
    moving = ("kvtool", "sha256", "weights_sha256", "weights_hash")  # which older files lack
    return {key: value for key, value in said.items() if key not in moving}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", CACHES)
def test_the_same_command_writes_the_same_file(name, tmp_path):
    path = tmp_path / "new.safetensors"
    make_cache(name, path, tmp_path / "told.json")
    close(tensors(path), tensors(DATA / f"{name}.safetensors"))
    assert labels(path) == labels(DATA / f"{name}.safetensors")


NOT_YET_RECORDED = (
    *("allocated_bytes", "kept_per_layer", "reads", "paired", "verdict", "codec"),
    *("keep_question", "scores", "digits", "answers", "one_token"),
    *("evicted", "evicted_share", "host_bytes", "label", "p"),
)


@pytest.fixture
def run(tmp_path):
    return shutil.copytree(DATA / "run", tmp_path / "run")


def command(*arguments: str) -> None:
    assert main(arguments) == 0


def measured(folder: Path) -> dict:
    """What a run found, without when, where and how fast."""
    document = json.loads((folder / "results.json").read_text())
    return without_seconds({key: part for key, part in document.items() if key not in MOVING + NEW})


def without_seconds(part):
    if isinstance(part, list):
        return [without_seconds(each) for each in part]
    if not isinstance(part, dict):
        return part
    differs = ("peak_memory_bytes", *NOT_YET_RECORDED)
    return {
        RENAMED.get(key, key): without_seconds(each)
        for key, each in part.items()
        if not key.endswith("_s") and key not in differs
    }


def without_fingerprint(line: str) -> dict:
    """A record without what the older ones do not say of themselves."""
    return {key: part for key, part in json.loads(line).items() if key != "fingerprint"}


def samples(folder: Path) -> dict[str, list]:
    files = sorted((folder / "samples").rglob("*.jsonl"))
    return {
        str(path.relative_to(folder)): [
            without_seconds(without_fingerprint(line)) for line in path.read_text().splitlines()
        ]
        for path in files
    }


def test_variants_are_read_under_their_old_name():
    old = json.loads((DATA / "run" / "results.json").read_text())
    found = ResultsDocument(**old)
    assert [each.name for each in found.variants] == [each["name"] for each in old["arms"]]
    assert [each.variant for each in found.results] == [each["arm"] for each in old["results"]]
    assert '"arm' not in found.to_json()
    assert ResultsDocument(**json.loads(found.to_json())) == found
    pairs = [Claim(says="a", pairs=[{key: "h2o", "than": "tova"}]) for key in ("arm", "variant")]
    assert pairs[0] == pairs[1]


@pytest.mark.exhaustive
def test_the_answers_of_an_old_run_are_scored_as_they_were(run):
    before = measured(run)
    command("eval", "-q", "--rescore", str(run), "-f", "json")
    assert measured(run) == before


@pytest.mark.exhaustive
def test_a_finished_old_run_has_nothing_left_to_measure(run):
    before = {path: path.read_bytes() for path in (run / "samples").rglob("*.jsonl")}
    command(*EVAL, "-o", str(run), "-f", "json")
    assert {path: path.read_bytes() for path in (run / "samples").rglob("*.jsonl")} == before


@pytest.mark.exhaustive
def test_an_old_run_that_was_broken_off_is_finished(run):
    whole = samples(DATA / "run")
    for path in sorted((run / "samples").rglob("niah.jsonl"))[::2]:
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:1]))
    assert samples(run) != whole
    command(*EVAL, "-o", str(run), "-f", "json")
    assert samples(run) == whole
    assert measured(run) == measured(DATA / "run")


def test_a_profile_and_a_plan_of_before_are_obeyed(tmp_path):
    plan = tmp_path / "plan.yaml"
    target = ("-b", "24", "--context", "192")
    command("plan-budget", "-q", str(DATA / "profile.yaml"), *target, "-o", str(plan))
    now, before = (yaml.safe_load(file.read_text()) for file in (plan, DATA / "plan.yaml"))
    assert now == before
    assert list(now) == list(before)
    told = tmp_path / "told.json"
    command(
        *("generate", "-q", str(DATA / "plan.yaml"), "-p", "h2o", "--prompt", "a b c d " * 40),
        *("-n", "2", "-f", "json", "-o", str(told)),
    )
    kept = json.loads(told.read_text())["cache"]["kept_per_layer"]
    assert sum(kept) == 24 * 4
    assert len(set(kept)) > 1
