"""Every mistake a user can make: one line, the right exit code, no traceback, no file."""

import json
import os
import re
import shutil
from importlib.util import find_spec

import pytest
from safetensors.torch import load_file, save_file

from kvtool.errors import KvtoolError
from kvtool.models import reference
from kvtool.policies.allocate.table import ALLOCATORS
from kvtool.policies.grammar import parse_policy
from kvtool.profiling.request import METRICS

REFUSED = {  # arguments after `generate`: exit code, the error line, what the hint says
    "unknown policy": (["-p", "snapvk"], 2, "no policy named `snapvk`; choose", "`snapkv`"),
    "untrained policy": (["-p", "loco"], 2, "policy `loco` is not offered", None),
    "no room": (["-p", "snapkv", "-b", "32"], 2, "budget 32 is not above window 32", None),
    "no size": (["-p", "h2o", "-b", "lots"], 2, "`lots` is not a size", "64MiB"),
    "lower-case k": (["-p", "h2o", "-b", "4k"], 2, "lower-case `k` in `4k`", "`4K`"),
    "budget without policy": (["-b", "64"], 2, "--budget needs a policy", "h2o+caote"),
    "missing file": (["--prompt-file", "gone.txt"], 2, "`gone.txt`: No such file", None),
    "not UTF-8": (["--prompt-file", "latin1.txt"], 2, "not UTF-8: byte 0xe9 at offset 3", "iconv"),
    "two prompts and turns": (
        ["--prompt-file", "utf8.txt", "--prompt", "a", "--turns", "turns.txt"],
        2,
        "--prompt, --prompt-file and --turns do not go together",
        "first line of --turns",
    ),
    "empty block": (["--prefill", "block:0"], 2, "a block is 1 token or more, got 0", None),
    "not a number": (["--temperature", "nan"], 2, "--temperature must be 0 or more, got nan", None),
    "more than a text": (["-n", "1e15"], 2, "`1e15` is above 2147483647, the most tokens", None),
    "a long budget": (["-p", "h2o", "-b", "9" * 5000], 2, f"`{'9' * 200}...` is not", "64MiB"),
    "unsupported": (["-m", "vit"], 1, "model `vit` (vit) is not a causal language model", None),
    "own code": (["-m", "own"], 2, "brings its own code", "--trust-remote-code"),
    "no such device": (["--device", "cuda:99"], 2, "no device `cuda:99`: ", "--device cpu"),
    "unknown map": (
        ["--device-map", "foo"],
        2,
        "no device map `foo`; choose auto, balanced, balanced_low_0, sequential, cpu, cuda",
        None,
    ),
    "no such map": (["--device-map", "cuda:99"], 2, "map `cuda:99`: ", "--device-map cpu"),
    "empty stop": (["--stop", ".", "--stop", ""], 2, "--stop is empty", "--stop TEXT"),
    "twice": (["--prompt", "a", "--prompt=b"], 2, "--prompt is given twice", None),
    "twice by two names": (["-b", "9", "--budget", "9"], 2, "--budget is given twice", None),
    "no GGUF": (["-m", "a.gguf"], 2, "`a.gguf` is no GGUF file", None),
    "quantised, not said": (["-m", "old"], 1, "`old` are quantised (GPTQ or AWQ)", "made from"),
    "folder as cache": (["--cache", "empty"], 2, "cache file `empty` is a folder", "--cache book"),
    "no cache": (["--cache", "latin1.txt"], 1, "`latin1.txt` is not a whole cache file", None),
    "no folder to write": (["-o", "gone/a.txt"], 2, "--output: folder `gone` does", "mkdir"),
    "one file for two": (["-o", "a", "--save", "a"], 2, "both write `a`", None),
    "unknown option": (["--temprature", "1"], 2, "no such option: --temprature", None),
    "unknown dtype": (
        ["--dtype", "float"],
        2,
        "--dtype: `float` is not one of `auto`, `float32`",
        None,
    ),
    "surplus word": (["text"], 2, "cannot read recipe or plan `text`: No such", None),
}


@pytest.fixture
def mistakes(tmp_path):
    """Files and folders that are wrong in their own ways."""
    (tmp_path / "latin1.txt").write_bytes("caf\xe9".encode("latin1"))
    (tmp_path / "utf8.txt").write_text("caf\xe9", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "llama"}')
    own = '"own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}'
    for name, kind in (("vit", '"vit"'), ("own", own)):
        shutil.copytree(reference.path(), tmp_path / name)
        (tmp_path / name / "config.json").write_text(f'{{"model_type": {kind}}}')
    (tmp_path / "a.gguf").touch()
    folder = shutil.copytree(reference.path(), tmp_path / "old")
    weights = load_file(folder / "model.safetensors")
    first = next(name for name in weights if name.endswith("q_proj.weight"))
    weights[first.removesuffix("weight") + "qweight"] = weights.pop(first)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.usefixtures("mistakes")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(kvtool, name):
    arguments, code, message, hint = REFUSED[name]
    files = set(os.listdir())
    done = kvtool("generate", "-q", *arguments)
    lines = done.err.splitlines()
    assert done.code == code, done.err
    assert done.out == ""
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert not lines[0].endswith(".")
    assert len(lines) <= 2
    assert all(line.startswith("hint: ") for line in lines[1:])
    if hint is not None:
        assert hint in lines[1]
    assert set(os.listdir()) == files


@pytest.mark.parametrize(
    ("settings", "called", "package"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "GPTQ", "optimum"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, "AWQ", "gptqmodel"),
        ({"load_in_4bit": True}, "bitsandbytes", "bitsandbytes"),
    ],
)
def test_quantised_weights_are_called_what_they_are(kvtool, tmp_path, settings, called, package):
    if find_spec(package) is not None:
        pytest.skip(f"{package} is here")
    folder = shutil.copytree(reference.path(), tmp_path / "small")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    done = kvtool("generate", "-q", "-m", "small", "--prompt", "a")
    told, hint = done.err.splitlines()
    assert (done.code, done.out) == (1, "")
    assert told.startswith(f"error: the weights of `small` are quantised with {called}, and cannot")
    assert package in told
    assert hint == "hint: give the checkpoint that it was made from"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "h2o", "--prompt", "a"], "no file to save to"),
        (["--save", "a.st", "--prompt", "a"], "no policy"),
        (["--save", "a.st", "-p", "h2o"], "no prompt"),
    ],
)
def test_compress_says_what_it_needs(kvtool, arguments, message):
    done = kvtool("compress", *arguments)
    assert (done.code, done.out) == (2, "")
    assert f"error: {message}" in done.err or message in done.err.splitlines()[0]
    assert os.listdir() == []


def test_empty_stdin_is_refused(kvtool):
    done = kvtool("generate", "--prompt-file", "-", stdin=b"")
    assert (done.code, done.err.splitlines()[0]) == (2, "error: stdin is empty")


def test_an_unknown_command_is_refused(kvtool):
    done = kvtool("compres")
    assert done.code == 2
    assert done.err == "error: no such command `compres`\nhint: did you mean `compress`?\n"


@pytest.mark.parametrize(("typed", "meant"), [("gen", "generate"), ("plan", "plan-budget")])
def test_the_beginning_of_a_command_is_understood_as_such(kvtool, typed, meant):
    done = kvtool(typed)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: no such command `{typed}`\nhint: did you mean `{meant}`?\n"


def test_options_that_take_many_values_and_flags_may_be_repeated(kvtool):
    options = ["eval", "-t", "niah", "-t", "ppl", "-p", "h2o", "-p", "tova", "-b", "64", "-b", "32"]
    more = [*("--set", "seed=1", "--set", "name=a"), "--fail-under", "niah=0"]
    more += ["--fail-under", "ppl=99"]
    done = kvtool(*options, *more, "-q", "-q", "--dry-run")
    assert (done.code, done.err) == (0, "")
    done = kvtool(*options, "--lengths", "256", "--lengths", "512", "--dry-run")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: --lengths is given twice, and takes one value\n"


def test_an_unknown_key_is_told_with_those_that_there_are(kvtool):
    done = kvtool("eval", "-t", "niah", "--set", "eval.samples=3", "--dry-run")
    assert done.code == 2
    assert "unknown key `samples`; keys here: tasks, baseline, limit, compare, query_a" in done.err


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("profile", METRICS),
        ("generate", ALLOCATORS),
        ("plan-budget", ALLOCATORS),
    ],
)
def test_help_lists_what_the_tables_hold(kvtool, command, names):
    words = " ".join(kvtool(command, "--help").out.split())
    assert ", ".join(names) in words


@pytest.mark.exhaustive
@pytest.mark.parametrize("data", ["bad.jsonl", "no-such-data-set"])
def test_data_of_a_profile_that_cannot_be_read_are_a_mistake_of_usage(
    kvtool, tmp_path, monkeypatch, data
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"\n')
    done = kvtool("profile", "--data", data, "--tokens", "8", "-q")
    assert (done.code, done.out) == (2, ""), done.err
    assert done.err.startswith("error: ")
    assert data in done.err


def test_a_mistake_as_text_holds_its_hint():
    with pytest.raises(KvtoolError) as caught:
        parse_policy("snapvk")
    assert str(caught.value).endswith("; did you mean `snapkv`?")
    assert caught.value.report() == caught.value.message
    assert str(KvtoolError("no model")) == "no model"


def test_debug_shows_the_traceback(kvtool):
    with pytest.raises(ValueError, match="budget 0 is not above 0"):
        kvtool("generate", "-p", "h2o", "-b", "0", "--debug")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--prompt", "x", "--save", "~no-such-user/x.safetensors"],
        ["generate", "--prompt", "x", "-m", "~no-such-user/x"],
        ["generate", "--prompt", "x", "-f", "json", "-o", "~no-such-user/x"],
        ["generate", "--prompt", "x", "-p", "loki(basis=~no-such-user/x)"],
        ["generate", "~no-such-user/x"],
        ["generate", "--prompt", "x", "--set", "budget.plan=~no-such-user/x", "-p", "h2o"],
        ["profile", "--data", "~no-such-user/x"],
        ["plan-budget", "-b", "64", "--plot", "~no-such-user/x.png"],
        ["eval", "-t", "niah", "-o", "~no-such-user/x"],
        ["eval", "-t", "ppl", "--data", "ppl=~no-such-user/x.txt", "-p", "h2o", "-b", "64"],
        ["eval", "-t", "niah", "--set", "eval.tasks.0.haystack=~no-such-user/x", "-p", "h2o"],
    ],
    ids=" ".join,
)
def test_a_home_folder_that_nobody_knows_is_one_line(kvtool, arguments):
    done = kvtool(*arguments)
    assert (done.code, done.out) == (2, "")
    told = [line for line in done.err.splitlines() if "error: " in line]
    assert len(told) == 1
    assert "no home folder is known for `~no-such-user`" in told[0]


def test_what_nobody_foresaw_is_one_line_with_its_place(kvtool, monkeypatch):
    monkeypatch.setattr("kvtool.cli.policies.describe", lambda: [][1])
    done = kvtool("policies")
    assert (done.code, done.out) == (1, "")
    line, hint = done.err.splitlines()
    assert line.startswith("error: IndexError: list index out of range (")
    assert re.search(r"kvtool/cli/policies\.py, line \d+\)$|test_refusals\.py, line \d+\)$", line)
    assert hint.startswith("hint: report it with the lines of --debug")
    with pytest.raises(IndexError):
        kvtool("policies", "--debug")
