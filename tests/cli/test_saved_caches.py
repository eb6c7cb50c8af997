"""Caches in files: written by compress and generate, continued by generate."""

import json
import os
import shutil

import pytest
from safetensors import safe_open

from kvtool.models import reference

PROMPT = "The secret code for falcon: 7429103. The old lamp was near the school."


def token_ids(kvtool, *arguments):
    done = kvtool("generate", "-q", "-f", "json", *arguments)
    assert done.code == 0, done.err
    return json.loads(done.out)["token_ids"]


@pytest.mark.few(2)
@pytest.mark.each_once
@pytest.mark.parametrize("policy", ["full", "h2o+caote", "snapkv(window=4)"])
@pytest.mark.parametrize("prefill", ["full", "block:5"])
def test_a_continued_run_is_the_unbroken_run(kvtool, policy, prefill):
    options = ["--prompt", PROMPT, "-p", policy, "--prefill", prefill]
    options += [] if policy == "full" else ["-b", "12"]
    whole = token_ids(kvtool, *options, "-n", "16")
    first = token_ids(kvtool, *options, "-n", "6", "--save", "a.st")
    then = token_ids(kvtool, "--cache", "a.st", "-n", "4", "--save", "b.st")
    last = token_ids(kvtool, "--cache", "b.st", "-n", "6")
    assert first + then + last == whole
    assert kvtool("compress", "-q", *options, "--save", "c.st").code == 0
    assert token_ids(kvtool, "--cache", "c.st", "-n", "16") == whole


def test_a_compressed_cache_answers_a_question(kvtool):
    kvtool("compress", "--prompt", PROMPT, "-p", "snapkv", "-b", "40", "--save", "a.st")
    done = kvtool("generate", "-q", "--cache", "a.st", "--prompt", " The secret code for falcon:")
    assert done.out.startswith(" 7429103.")


def test_compress_reports_what_it_kept(kvtool):
    done = kvtool("compress", "--prompt", PROMPT, "-p", "h2o", "-b", "10", "--save", "a.st")
    report = json.loads(done.out)
    assert (report["kind"], report["policy"], report["budget"]) == ("compression", "h2o", 10)
    assert report["cache"]["kept_per_layer"] == [10] * 4
    assert report["cache"]["tokens_seen"] == report["prompt_tokens"]
    assert report["saved"] == "a.st"
    assert "saved a.st" in done.err
    assert os.listdir() == ["a.st"]


def test_the_file_is_what_the_contract_says(kvtool):
    kvtool("compress", "--prompt", PROMPT, "-p", "h2o", "-b", "10", "--save", "a.st")
    with safe_open("a.st", "pt") as file:
        about = file.metadata()
        assert about["kind"] == "kvtool.cache"
        assert (about["policy"], about["budget"], about["model"]) == ("h2o", "10", "reference")
        assert len(about["config_hash"]) == 64
        assert file.get_tensor("layer.0.keys").shape == (1, 2, 10, 32)
        assert file.get_tensor("next_logits").shape[0] == 1
        positions = file.get_tensor("layer.3.positions")
        assert (positions.diff() > 0).all()
        assert file.get_tensor("input_ids").shape[1] == int(about["tokens_seen"])


@pytest.fixture
def saved(kvtool):
    """A folder with a good cache, a.st."""
    kvtool("compress", "-q", "--prompt", PROMPT, "-p", "h2o", "-b", "10", "--save", "a.st")


def refusal(kvtool, *arguments):
    done = kvtool("generate", "-q", "--cache", *arguments)
    assert done.code in (1, 2)
    assert done.out == ""
    (line,) = done.err.splitlines()
    return line


@pytest.mark.usefixtures("saved")
def test_flags_that_disagree_are_refused(kvtool):
    assert "made with policy `h2o`, not `tova`" in refusal(kvtool, "a.st", "-p", "tova")
    assert "made with budget 10, not 11" in refusal(kvtool, "a.st", "-b", "11")
    assert token_ids(kvtool, "--cache", "a.st", "-p", "H2O", "-b", "10", "-n", "1")


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("share", [0.001, 0.99])
def test_a_truncated_file_is_refused(kvtool, tmp_path, share):
    data = (tmp_path / "a.st").read_bytes()
    (tmp_path / "b.st").write_bytes(data[: int(share * len(data))])
    assert "`b.st` is not a whole cache file" in refusal(kvtool, "b.st")


@pytest.mark.usefixtures("saved")
def test_a_changed_file_is_refused(kvtool, tmp_path):
    data = bytearray((tmp_path / "a.st").read_bytes())
    data[-5] ^= 1
    (tmp_path / "b.st").write_bytes(data)
    assert "`b.st` was changed after it was written" in refusal(kvtool, "b.st")


@pytest.mark.usefixtures("saved")
def test_changed_metadata_is_refused(kvtool, tmp_path):
    data = (tmp_path / "a.st").read_bytes().replace(b'"budget":"10"', b'"budget":"11"')
    (tmp_path / "b.st").write_bytes(data)
    assert "`b.st` was changed after it was written" in refusal(kvtool, "b.st")


@pytest.mark.usefixtures("saved")
def test_the_cache_of_another_model_is_refused(kvtool, tmp_path):
    other = shutil.copytree(reference.path(), tmp_path / "other")
    config = json.loads((other / "config.json").read_text()) | {"rms_norm_eps": 1e-4}
    (other / "config.json").write_text(json.dumps(config))
    assert "holds the cache of another model, `reference`" in refusal(kvtool, "a.st", "-m", "other")


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("command", [("generate", "-n", "2"), ("compress", "-p", "h2o")])
def test_a_failed_save_leaves_the_old_file(kvtool, tmp_path, full_disk, command):
    before = (tmp_path / "a.st").read_bytes()
    with full_disk(2048):
        done = kvtool(*command, "-q", "--prompt", PROMPT, "--save", "a.st")
    assert done.code == 1
    assert done.err == f"error: cannot write `{tmp_path}/a.st`: File too large\n"
    assert (tmp_path / "a.st").read_bytes() == before
    assert os.listdir() == ["a.st"]
