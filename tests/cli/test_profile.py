"""`kvtool profile` as a user runs it."""

import hashlib
import json
import shutil

import pytest
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from kvtool.documents.profile import ProfileDocument
from kvtool.documents.source import Source
from kvtool.models import reference
from kvtool.profiling.request import METRICS

QUICK = ("--samples", "2", "--tokens", "100", "--decode", "10")


def profile(kvtool, *arguments) -> ProfileDocument:
    done = kvtool("profile", "-q", *arguments)
    assert (done.code, done.err) == (0, "")
    return Source.parse(done.out, "stdout").validate(ProfileDocument)


def test_a_piped_profile_is_yaml_with_a_number_per_layer(kvtool):
    done = kvtool("profile", *QUICK)
    assert done.code == 0
    assert done.err == "model: reference (bundled; choose another with --model)\n"
    data = yaml.safe_load(done.out)
    assert (data["kind"], data["schema_version"]) == ("profile", 1)
    assert data["model"]["id"] == "reference"
    assert data["model"]["kv_bytes_per_token"] == 2 * 4 * 2 * 32 * 4
    assert data["data"]["samples"] == 2
    assert (data["data"]["tokens"], data["data"]["decode"]) == (100, 10)
    assert list(data["metrics"]) == ["f_variance", "entropy", "query_cosine", "topk_union"]
    for values in data["metrics"].values():
        assert len(values) == data["model"]["layers"] == 4
    assert "heads_file" not in data


def test_the_same_seed_gives_the_same_bytes_and_another_other_texts(kvtool):
    runs = [kvtool("profile", "-q", *QUICK, "--seed", seed).out for seed in ("0", "0", "1")]
    assert runs[0] == runs[1] != runs[2]


def test_numbers_per_head_go_to_a_file_beside_it(kvtool, tmp_path):
    done = kvtool("profile", *QUICK, "-o", "p.yaml")
    assert (done.code, done.out) == (0, "")
    document = Source.parse((tmp_path / "p.yaml").read_text(), "p").validate(ProfileDocument)
    heads = tmp_path / document.heads_file.path
    assert heads.name == "p.heads.safetensors"
    assert hashlib.sha256(heads.read_bytes()).hexdigest() == document.heads_file.sha256
    values = load_file(heads)["f_variance"]
    assert values.shape == (4, 4)
    assert values.mean(1).tolist() == pytest.approx(document.metrics.f_variance, rel=1e-5)
    with safe_open(heads, "pt") as file:
        assert file.metadata()["kind"] == "kvtool.heads"


def test_every_metric_at_once(kvtool, tmp_path):
    document = profile(
        kvtool, *QUICK, "--metrics", ",".join(METRICS), "-p", "tova", "--budgets", "64,10%,50%"
    )
    for name in METRICS:
        assert getattr(document.metrics, name) is not None
    errors = document.metrics.output_error
    assert (errors.policy, errors.budgets) == ("tova", [10, 50, 64])
    assert all(len(row) == 3 for row in errors.errors)


def test_losses_of_heads_are_written_beside_those_of_layers(kvtool, tmp_path):
    asked = ("--samples", "2", "--tokens", "80", "--decode", "8", "--budgets", "20,40")
    metric = "answer_loss(heads=true)"
    dry = kvtool("profile", *asked, "--metrics", metric, "--dry-run", "-q").out
    assert yaml.safe_load(dry)["answer_loss"]["heads"] is True
    kvtool("profile", "-q", *asked, "--metrics", metric, "-o", "p.yaml")
    text = (tmp_path / "p.yaml").read_text()
    found = Source.parse(text, "p").validate(ProfileDocument).metrics.answer_loss
    assert found.policy == "h2o"
    for each in (found.heads.losses, found.heads.standard_errors, *found.heads.by_sample):
        assert [[len(curve) for curve in own] for own in each] == [[2, 2]] * 4
    first, second = (sample[1][0][0] for sample in found.heads.by_sample)
    assert found.heads.losses[1][0][0] == pytest.approx((first + second) / 2, rel=1e-5)
    error = abs(first - second) / 2  # the standard deviation over the root of two samples
    assert found.heads.standard_errors[1][0][0] == pytest.approx(error, rel=1e-4)
    by_head = load_file(tmp_path / "p.heads.safetensors")["answer_loss"]
    assert by_head.shape == (4, 2, 2)
    alone = kvtool("profile", "-q", *asked, "--metrics", "answer_loss").out
    assert "heads" not in yaml.safe_load(alone)["metrics"]["answer_loss"]
    assert yaml.safe_load(alone)["metrics"]["answer_loss"]["losses"] == found.losses
    done = kvtool("plan-budget", "p.yaml", "-b", "30", "-p", "h2o", "--allocator", "optimal")
    assert "it adds up layers" in done.err or "beyond noise" in done.err


def test_memory_needs_a_configuration_and_nothing_else(kvtool, tmp_path):
    (tmp_path / "bare").mkdir()
    shutil.copy(reference.path() / "config.json", tmp_path / "bare")
    document = profile(kvtool, "-m", "bare", "--metrics", "memory", "--dtype", "bfloat16")
    assert document.data is None
    assert document.model.dtype == document.metrics.memory.dtype == "bfloat16"
    assert document.metrics.memory.layer_bytes_per_token == [2 * 2 * 32 * 2] * 4


def test_texts_of_a_file_are_cut_into_pieces(kvtool, tmp_path):
    rows = [{"text": "The old lamp was near the school. " * 60}, {"text": "Short."}]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("--data", "texts.jsonl", "--tokens", "100", "--metrics", "entropy")
    document = profile(kvtool, *arguments, "--samples", "3")
    assert (document.data.source, document.data.samples) == ("texts.jsonl", 3)
    assert document.data.decode is None
    fingerprint = hashlib.sha256((tmp_path / "texts.jsonl").read_bytes()).hexdigest()
    assert document.data.fingerprint == fingerprint
    done = kvtool("profile", *arguments, "--samples", "50")
    assert done.code == 0
    assert "note: texts.jsonl has only" in done.err


@pytest.mark.parametrize("more", [(), ("-o", "-")])
def test_a_terminal_shows_what_a_file_gets_as_yaml(kvtool, at_terminal, tmp_path, more):
    memory = ("profile", "-q", "--metrics", "memory")
    assert at_terminal(*memory, *more).out == kvtool(*memory, "-f", "text").out
    assert at_terminal(*memory, "-f", "yaml").out == kvtool(*memory).out
    assert at_terminal(*memory, "-o", "here").out == ""  # no suffix says anything
    assert (tmp_path / "here").read_text() == kvtool(*memory).out
    assert kvtool(*memory).out.startswith("kind: profile\n")


def test_a_dry_run_says_what_would_be_measured(kvtool):
    done = kvtool("profile", "--dry-run", *QUICK, "--metrics", "memory,output_error,entropy")
    data = yaml.safe_load(done.out)
    assert data["metrics"] == ["entropy", "output_error", "memory"]
    assert data["output_error"] == {"policy": "h2o", "budgets": [6, 12, 25, 50]}
    assert data["data"]["decode"] == 10


@pytest.mark.exhaustive
def test_a_picture_is_drawn(kvtool, tmp_path):
    pytest.importorskip("matplotlib")
    done = kvtool("profile", "-q", *QUICK, "--plot", "p.svg")
    assert done.code == 0
    assert "cosine by distance" in (tmp_path / "p.svg").read_text()


REFUSED = {
    "unknown metric": (["--metrics", "entropie"], "no metric `entropie`", "`entropy`"),
    "no metric": (["--metrics", ","], "--metrics names nothing", "f_variance"),
    "no decoding": (["--decode", "0"], "--decode must be 1 or more, got 0", None),
    "too long": (
        ["--tokens", "16K"],
        "16384 tokens and 128 decoded are more than the 8192",
        "8064",
    ),
    "missing file": (["--data", "gone.txt"], "--data: no file `gone.txt`", None),
    "short file": (
        ["--data", "short.txt", "--tokens", "500"],
        "--data: no text of `short.txt` has 500 tokens, the longest has",
        "--tokens",
    ),
    "policy for nothing": (["-p", "h2o"], "--policy is that of output_error", "output_error"),
    "budgets for nothing": (["--budgets", "9"], "--budgets is that of output_error", None),
    "no picture": (["--plot", "p.doc"], "--plot must end in .png, .svg, .pdf, got `p.doc`", None),
    "no folder": (["--plot", "gone/p.png"], "--plot: folder `gone` does not exist", "mkdir"),
    "memory has no picture": (
        ["--plot", "p.png", "--metrics", "memory"],
        "--plot: memory alone has no picture",
        None,
    ),
}
ERROR_REFUSED = {
    "full in 4 bits": (
        ["-p", "full+int4(rotate=false)"],
        "policy `full+int4(rotate=false)` keeps everything; output_error is",
        "kvtool eval -t output-error -p 'full+int4(rotate=false)'",
    ),
    "split by itself": (["-p", "pyramidkv"], "policy `pyramidkv` splits a budget", "--policy h2o"),
    "bytes": (["--budgets", "1MiB"], "--budgets: 1MiB is not within the", "shares"),
}


@pytest.mark.parametrize("case", [*REFUSED, *ERROR_REFUSED])
def test_mistakes_are_told_in_one_line_before_the_model_loads(kvtool, monkeypatch, tmp_path, case):
    def fail(*args, **kwargs):
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr("kvtool.models.attached.load", fail)
    (tmp_path / "short.txt").write_text("The old lamp was near the school.")
    arguments, message, hint = (REFUSED | ERROR_REFUSED)[case]
    if case in ERROR_REFUSED:
        arguments = ["--metrics", "output_error", *arguments]
    done = kvtool("profile", *arguments)
    assert (done.code, done.out) == (2, "")
    error, *rest = done.err.splitlines()
    assert error.startswith(f"error: {message}")
    assert hint is None or hint in rest[0]


def test_a_missing_plots_extra_is_told_before_the_model_loads(kvtool, monkeypatch):
    monkeypatch.setattr("kvtool.extras._absent", lambda extra: ["matplotlib"])
    done = kvtool("profile", "--plot", "p.png")
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[0] == "error: --plot needs matplotlib"
