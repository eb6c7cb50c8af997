"""Every command on a model in a GGUF file."""

import json

import pytest
import yaml

from kvtool.models.load import load_config
from tests.models import tiny_gguf

pytest.importorskip("gguf", reason="GGUF files need the package gguf")
TEXT = "the sea in the sea in 12 7 the sea " * 8


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def gguf(kvtool, written, tmp_path):
    """A name for the file in the current folder."""
    (tmp_path / "tiny.gguf").symlink_to(written)
    return "tiny.gguf"


def test_generate_and_compress(kvtool, gguf):
    given = ["-m", gguf, "-p", "h2o", "-f", "json"]
    done = kvtool("generate", *given, "-b", "16", "--prompt", TEXT, "-n", "4")
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert (answer["model"], answer["cache"]["kept_per_layer"]) == (gguf, [16, 16])
    assert "kvtool convert tiny.gguf DIR" in done.err
    done = kvtool("compress", *given, "-b", "24", "--prompt", TEXT, "--save", "a.st")
    assert done.code == 0, done.err
    done = kvtool("generate", "-m", gguf, "--cache", "a.st", "--prompt", "the sea", "-n", "4")
    assert done.code == 0, done.err


def test_plan_and_profile_name_the_file_and_its_configuration(kvtool, gguf):
    done = kvtool("profile", "-m", gguf, "--samples", "1", "--tokens", "64", "--decode", "4")
    assert done.code == 0, done.err
    profile = yaml.safe_load(done.out)["model"]
    done = kvtool("plan-budget", "-m", gguf, "-b", "64", "--context", "1K")
    assert done.code == 0, done.err
    plan = yaml.safe_load(done.out)["model"]
    assert profile["id"] == plan["id"] == gguf
    assert profile["config_hash"] == plan["config_hash"]
    assert (plan["layers"], plan["kv_heads"]) == (tiny_gguf.LAYERS, tiny_gguf.KV_HEADS)
    assert "dtype: float32, the checkpoint's own" in done.err


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_recipe_names_a_file(kvtool, gguf, tmp_path, dry):
    (tmp_path / "r.yaml").write_text(
        f"kind: recipe\nschema_version: 1\nmodel: {{id: {gguf}}}\npolicy: streaming\n"
        "budget: {tokens: 64}\neval: {tasks: [{task: niah, samples: 1, lengths: [256], depths: "
        "[50]}]}\n"
    )
    done = kvtool("eval", "r.yaml", *dry, "-o", "run")
    assert done.code == 0, done.err
    assert (tmp_path / "run" / "results.json").is_file() != bool(dry)


def test_a_dry_run_tells_the_memory(kvtool, gguf):
    done = kvtool("generate", "-m", gguf, "-p", "h2o", "-b", "32", "--prompt", TEXT, "--dry-run")
    assert done.code == 0, done.err
    assert yaml.safe_load(done.out)["memory"]["weights_bytes"] > 0
    assert "memory: fits" in done.err


def test_nothing_but_notes_is_printed(kvtool, gguf):
    done = kvtool("generate", "-q", "-m", gguf, "-p", "full", "--prompt", TEXT, "-n", "2")
    assert (done.code, done.err) == (0, "")
    done = kvtool("generate", "--progress", "-m", gguf, "-p", "full", "--prompt", TEXT, "-n", "2")
    assert "GGUF tensors" in done.err


def test_a_file_that_cannot_be_read_is_one_line(kvtool, tmp_path):
    tiny_gguf.write(tmp_path / "odd.gguf", pre="wondrous")
    for command in (["plan-budget", "-b", "64"], ["generate", "-p", "h2o", "-b", "64"]):
        done = kvtool(command[0], "-m", "odd.gguf", *command[1:])
        lines = done.err.splitlines()[-2:]
        assert done.code == 1
        assert lines[0].startswith("error: `odd.gguf` splits text by the rule `wondrous`")
        assert lines[1].startswith("hint: give the checkpoint")


def test_tensor_parallel_takes_folders(kvtool, gguf, monkeypatch):
    monkeypatch.setattr("kvtool.models.load.check_processes", lambda *places: None)
    done = kvtool("generate", "-m", gguf, "--tensor-parallel", "-p", "h2o", "-b", "64")
    assert done.code == 2
    assert "hint: kvtool convert tiny.gguf FOLDER" in done.err
    assert load_config(gguf).num_hidden_layers == tiny_gguf.LAYERS
