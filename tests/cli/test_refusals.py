"""Every mistake a user can make: one line, the right exit code, no traceback, no file."""

import os
import shutil

import pytest

from kvtool.models import reference

REFUSED = {  # arguments after `generate`: exit code, the error line, what the hint says
    "unknown policy": (["-p", "snapvk"], 2, "no policy named `snapvk`; choose", "`snapkv`"),
    "unknown parameter": (["-p", "h2o(recnt=3)"], 2, "`h2o` has no parameter `recnt`", "`recent`"),
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
    "two prompts": (["--prompt", "a", "--prompt-file", "b"], 2, "exclude each other", None),
    "unknown prefill": (["--prefill", "blocks"], 2, "block or block:M, got `blocks`", "`block`"),
    "empty block": (["--prefill", "block:0"], 2, "a block is 1 token or more, got 0", None),
    "no tokens": (["-n", "0"], 2, "--max-new-tokens must be 1 or more, got 0", None),
    "half a token": (["-n", "0.5"], 2, "`0.5` is not a whole number", None),
    "cold": (["--temperature", "-1"], 2, "--temperature must be 0 or more, got -1.0", None),
    "not a number": (["--temperature", "nan"], 2, "--temperature must be 0 or more, got nan", None),
    "missing model": (["-m", "./gone"], 2, "model folder `./gone` does not exist", None),
    "model without weights": (["-m", "empty"], 2, "model folder `empty` has no weights", None),
    "unsupported": (["-m", "vit"], 1, "model `vit` (vit) is not a causal language model", None),
    "own code": (["-m", "own"], 2, "brings its own code", "--trust-remote-code"),
    "unknown device": (["--device", "tpu"], 2, "no device `tpu`", None),
    "missing cache": (["--cache", "gone.st"], 2, "cache file `gone.st` does not exist", None),
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
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "llama"}')
    own = '"own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}'
    for name, kind in (("vit", '"vit"'), ("own", own)):
        shutil.copytree(reference.path(), tmp_path / name)
        (tmp_path / name / "config.json").write_text(f'{{"model_type": {kind}}}')


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


def test_debug_shows_the_traceback(kvtool):
    with pytest.raises(ValueError, match="budget 0 is not above 0"):
        kvtool("generate", "-p", "h2o", "-b", "0", "--debug")
