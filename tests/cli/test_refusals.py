"""Every mistake a user can make: one line, the right exit code, no traceback, no file."""

import json
import os
import shutil
from importlib.util import find_spec

import pytest
from safetensors.torch import load_file, save_file

from kvtool.documents.recipe import TASK_SETTINGS
from kvtool.errors import KvtoolError
from kvtool.evaluation.tasks.table import TASKS, task_class
from kvtool.models import reference
from kvtool.policies.allocate.table import ALLOCATORS
from kvtool.policies.grammar import parse_policy
from kvtool.profiling.request import METRICS

REFUSED = {  # arguments after `generate`: exit code, the error line, what the hint says
    "unknown policy": (["-p", "snapvk"], 2, "no policy named `snapvk`; choose", "`snapkv`"),
    "unknown parameter": (["-p", "h2o(recnt=3)"], 2, "`h2o` has no parameter `recnt`", "`recent`"),
    "heads in 4 bits": (
        ["-m", "narrow", "-p", "h2o+int4"],
        2,
        "a head of this model has 16",
        "fp8",
    ),
    "unknown modifier": (["-p", "h2o+coate"], 2, "no modifier named `coate`", "`caote`"),
    "untrained policy": (["-p", "loco"], 2, "policy `loco` is not offered", None),
    "senseless pair": (["-p", "full+caote"], 2, "`caote` weighs values by attention", "h2o"),
    "no room": (["-p", "snapkv", "-b", "32"], 2, "budget 32 is not above window 32", None),
    "no room for sinks": (["-p", "streaming", "-b", "4"], 2, "budget 4 is not above sinks 4", None),
    "no room in a share": (
        ["-p", "streaming", "-b", "10%", "--prompt", "The old lamp was near the school."],
        2,
        "budget 1 is not above sinks 4",
        None,
    ),
    "budget 0": (["-p", "h2o", "-b", "0"], 2, "budget 0 is not above 0", "4K"),
    "negative budget": (["-p", "h2o", "-b", "-5"], 2, "budget -5 is not above 0", "4K"),
    "lower-case k": (["-p", "h2o", "-b", "4k"], 2, "lower-case `k` in `4k`", "`4K`"),
    "more than all": (["-p", "h2o", "-b", "120%"], 2, "budget ratio 1.2 is above 1", None),
    "no size": (["-p", "h2o", "-b", "lots"], 2, "`lots` is not a size", "64MiB"),
    "bytes for nothing": (["-p", "h2o", "-b", "10B"], 2, "budget 10B is too small", None),
    "budget without policy": (["-b", "64"], 2, "--budget needs a policy", "h2o+caote"),
    "empty prompt": (["--prompt", ""], 2, "--prompt is empty", "one word"),
    "missing file": (["--prompt-file", "gone.txt"], 2, "`gone.txt` does not exist", None),
    "not UTF-8": (["--prompt-file", "latin1.txt"], 2, "not UTF-8: byte 0xe9 at offset 3", "iconv"),
    "file and an empty question": (
        ["--prompt-file", "utf8.txt", "--prompt", " "],
        2,
        "--prompt is empty",
        "one word",
    ),
    "empty file and a question": (
        ["--prompt-file", "empty.txt", "--prompt", "a"],
        2,
        "prompt file `empty.txt` is empty",
        "one word",
    ),
    "a question about latin-1": (
        ["--prompt-file", "latin1.txt", "--prompt", "a"],
        2,
        "not UTF-8: byte 0xe9 at offset 3",
        "iconv",
    ),
    "two prompts and turns": (
        ["--prompt-file", "utf8.txt", "--prompt", "a", "--turns", "turns.txt"],
        2,
        "--prompt, --prompt-file and --turns do not go together",
        "first line of --turns",
    ),
    "unknown prefill": (["--prefill", "blocks"], 2, "block or block:M, got `blocks`", "`block`"),
    "empty block": (["--prefill", "block:0"], 2, "a block is 1 token or more, got 0", None),
    "no tokens": (["-n", "0"], 2, "--max-new-tokens must be 1 or more, got 0", None),
    "half a token": (["-n", "0.5"], 2, "`0.5` is not a whole number", None),
    "cold": (["--temperature", "-1"], 2, "--temperature must be 0 or more, got -1.0", None),
    "not a number": (["--temperature", "nan"], 2, "--temperature must be 0 or more, got nan", None),
    "nearly 0": (["--temperature", "1e-320"], 2, "must be 0 or more, and at least 1e-06", None),
    "more than a text": (["-n", "1e15"], 2, "`1e15` is above 2147483647, the most tokens", None),
    "a seed of 30 digits": (
        ["--seed", "9" * 30],
        2,
        "--seed: must be at most 92233720",
        None,
    ),
    "a seed of a policy": (["-p", f"random(seed={'9' * 30})"], 2, "random: seed must be at", None),
    "a seed of a modifier": (["-p", f"h2o+cam(m={2**65})"], 2, "cam: m must be at most", None),
    "sinks": (["-p", f"d2o(sinks={2**64})"], 2, "d2o: sinks must be at most 2147483647", None),
    "a slope": (["-p", "h2o+pyramid(beta=nan)"], 2, "beta must be a number, got `nan`", None),
    "a long policy": (["-p", "x" * 5000], 2, f"no policy named `{'x' * 200}...`; choose", None),
    "a long budget": (["-p", "h2o", "-b", "9" * 5000], 2, f"`{'9' * 200}...` is not", "64MiB"),
    "missing model": (["-m", "./gone"], 2, "model folder `./gone` does not exist", None),
    "model without weights": (["-m", "empty"], 2, "model folder `empty` has no weights", None),
    "unsupported": (["-m", "vit"], 1, "model `vit` (vit) is not a causal language model", None),
    "own code": (["-m", "own"], 2, "brings its own code", "--trust-remote-code"),
    "unknown device": (["--device", "tpu"], 2, "no device `tpu`; choose auto, cpu, cuda", None),
    "no such device": (["--device", "cuda:99"], 2, "no device `cuda:99`: ", "--device cpu"),
    "unknown map": (
        ["--device-map", "foo"],
        2,
        "no device map `foo`; choose auto, balanced, balanced_low_0, sequential, cpu, cuda",
        None,
    ),
    "no such map": (["--device-map", "cuda:99"], 2, "map `cuda:99`: ", "--device-map cpu"),
    "two ways to places": (
        ["--device", "cpu", "--device-map", "auto"],
        2,
        "--device and --device-map exclude each other",
        None,
    ),
    "empty stop": (["--stop", ".", "--stop", ""], 2, "--stop is empty", "--stop TEXT"),
    "twice": (["--prompt", "a", "--prompt=b"], 2, "--prompt is given twice", None),
    "twice by two names": (["-b", "9", "--budget", "9"], 2, "--budget is given twice", None),
    "no GGUF": (["-m", "a.gguf"], 2, "`a.gguf` is no GGUF file", None),
    "missing GGUF": (["-m", "me/a/b.Q4.gguf"], 2, "`me/a/b.Q4.gguf` does not exist", "REPO:b.Q4"),
    "folder of no GGUF": (["-m", "ggufs"], 2, "`ggufs` is no GGUF file", None),
    "quantised, not said": (["-m", "old"], 1, "`old` are quantised (GPTQ or AWQ)", "made from"),
    "missing cache": (["--cache", "gone.st"], 2, "cache file `gone.st` does not exist", None),
    "folder as cache": (["--cache", "empty"], 2, "cache file `empty` is a folder", "file in it"),
    "no cache": (["--cache", "latin1.txt"], 1, "`latin1.txt` is not a whole cache file", None),
    "no folder to save": (
        ["--save", "gone/a.st"],
        2,
        "--save: folder `gone` does",
        "mkdir -p gone",
    ),
    "no folder to write": (["-o", "gone/a.txt"], 2, "--output: folder `gone` does", "mkdir"),
    "folder as output": (["-o", "empty"], 2, "--output: `empty` is a folder", None),
    "one file for two": (["-o", "a", "--save", "a"], 2, "both write `a`", None),
    "unknown option": (["--temprature", "1"], 2, "no such option: --temprature", None),
    "unknown dtype": (
        ["--dtype", "float"],
        2,
        "--dtype: `float` is not one of `auto`, `float32`",
        None,
    ),
    "number too small": (["--seed", "-1"], 2, "--seed: must be at least 0, got `-1`", None),
    "word for a number": (["--seed", "x"], 2, "--seed: must be a whole number, got `x`", None),
    "surplus word": (["text"], 2, "recipe or plan: `text` does not exist", None),
}


@pytest.fixture
def mistakes(tmp_path):
    """Files and folders that are wrong in their own ways."""
    (tmp_path / "latin1.txt").write_bytes("caf\xe9".encode("latin1"))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "utf8.txt").write_text("caf\xe9", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "llama"}')
    narrow = shutil.copytree(reference.path(), tmp_path / "narrow") / "config.json"
    narrow.write_text(json.dumps(json.loads(narrow.read_text()) | {"head_dim": 16}))
    own = '"own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}'
    for name, kind in (("vit", '"vit"'), ("own", own)):
        shutil.copytree(reference.path(), tmp_path / name)
        (tmp_path / name / "config.json").write_text(f'{{"model_type": {kind}}}')
    (tmp_path / "a.gguf").touch()
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "b.gguf").touch()
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
        (["--save", "gone/a.st", "-p", "h2o", "--prompt", "a"], "folder `gone` does not exist"),
        (["--save", "a.st", "-p", "h2o", "--prompt", ""], "--prompt is empty"),
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


@pytest.mark.parametrize(
    ("typed", "meant"), [("gen", "generate"), ("plan", "plan-budget"), ("prof", "profile")]
)
def test_the_beginning_of_a_command_is_understood_as_such(kvtool, typed, meant):
    done = kvtool(typed)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: no such command `{typed}`\nhint: did you mean `{meant}`?\n"


def test_options_that_take_many_values_and_flags_may_be_repeated(kvtool):
    options = ["eval", "-t", "niah", "-t", "ppl", "-p", "h2o", "-p", "tova", "-b", "64", "-b", "32"]
    more = [
        "--set",
        "seed=1",
        "--set",
        "name=a",
        "--fail-under",
        "niah=0",
        "--fail-under",
        "ppl=99",
    ]
    done = kvtool(*options, *more, "-q", "-q", "--dry-run")
    assert (done.code, done.err) == (0, "")
    done = kvtool(*options, "--lengths", "256", "--lengths", "512", "--dry-run")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: --lengths is given twice, and takes one value\n"


def test_a_setting_of_a_task_that_stands_beside_the_tasks_is_led_there(kvtool):
    done = kvtool("eval", "-t", "niah", "--set", "eval.samples=3", "--dry-run")
    assert done.code == 2
    assert "unknown key `samples`; did you mean `eval.tasks.N.samples`?" in done.err


def test_every_setting_of_a_task_is_known_as_such():
    settings = {name for task in TASKS for name in task_class(task).model_fields}
    assert set(TASK_SETTINGS) == settings - {"name", "seed"}


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("profile", METRICS),
        ("generate", ALLOCATORS),
        ("compress", ALLOCATORS),
        ("eval", ALLOCATORS),
        ("plan-budget", ALLOCATORS),
    ],
)
def test_help_lists_what_the_tables_hold(kvtool, command, names):
    words = " ".join(kvtool(command, "--help").out.split())
    assert ", ".join(names) in words


@pytest.mark.exhaustive
@pytest.mark.parametrize("data", ["gone.jsonl", "empty", "bad.jsonl", "no-such-data-set"])
@pytest.mark.usefixtures("mistakes")
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
        ["generate", "--prompt", "x", "--cache", "~no-such-user/x.safetensors"],
        ["generate", "--prompt-file", "~no-such-user/x"],
        ["generate", "--turns", "~no-such-user/x"],
        ["generate", "--prompt", "x", "-m", "~no-such-user/x"],
        ["generate", "--prompt", "x", "-f", "json", "-o", "~no-such-user/x"],
        ["generate", "--prompt", "x", "-p", "loki(basis=~no-such-user/x)"],
        ["generate", "--prompt", "x", "-p", "duoattention(scores=~no-such-user/x)", "-b", "64"],
        ["generate", "~no-such-user/x"],
        ["generate", "--prompt", "x", "--set", "budget.plan=~no-such-user/x", "-p", "h2o"],
        ["profile", "--data", "~no-such-user/x"],
        ["profile", "--plot", "~no-such-user/x.png"],
        ["plan-budget", "-b", "64", "--plot", "~no-such-user/x.png"],
        ["eval", "-t", "niah", "-o", "~no-such-user/x"],
        ["eval", "--rescore", "~no-such-user/x"],
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
