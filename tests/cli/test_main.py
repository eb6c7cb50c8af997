"""The installed command as a process: speed, streams, interruption."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from kvtool.policies.table import BASES, MODIFIERS
from kvtool.version import VERSION
from tests.cli.test_startup import ended
from tests.tiers import first

KVTOOL = str(Path(sys.executable).with_name("kvtool"))


def process(*arguments, **more):
    return subprocess.run([KVTOOL, *arguments], capture_output=True, text=True, **more)


def test_help_imports_nothing_heavy():
    heavy = ["torch", "transformers", "numpy", "datasets", "yaml", "rich"]
    commands = (["--help"], ["generate", "--help"], ["--version"])
    assert [each[:2] for each in ended(*commands, watched=heavy)] == [[0, []]] * 3


def test_a_wrong_prompt_is_refused_before_torch_is_imported(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    ((code, imported, _),) = ended(
        ["generate", "--prompt-file", str(tmp_path / "a.txt"), "-p", "h2o"], watched=["torch"]
    )
    assert (code, imported) == (2, [])


def test_importing_kvtool_imports_no_torch():
    program = "import kvtool, sys; dir(kvtool); print('torch' in sys.modules, kvtool.__version__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == f"False {VERSION}\n"


def test_public_names_are_there():
    import kvtool

    for name in kvtool.__all__:
        assert getattr(kvtool, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'compres'"):
        kvtool.compres  # noqa: B018


def test_no_command_shows_the_help():
    done = process()
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: kvtool" in done.stderr


@pytest.mark.exhaustive
def test_what_libraries_print_goes_to_stderr(tmp_path):
    program = (
        "import os\nimport kvtool.cli.policies as page\n"
        "real = page.describe\n"
        "def noisy():\n    print('from python')\n    os.system('echo from C')\n    return real()\n"
        "page.describe = noisy\n"
        "from kvtool.cli.main import run\nrun(['policies', '-f', 'json'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert [entry["name"] for entry in json.loads(done.stdout)] == [*BASES, *MODIFIERS]
    assert "from python" in done.stderr
    assert "from C" in done.stderr


def start(*arguments):
    return subprocess.Popen(
        [KVTOOL, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell in the background has its children ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.exhaustive
def test_ctrl_c_before_the_first_token_ends_quietly():
    running = start("generate", "--prompt", "The old lamp", "-n", "32K")
    for line in running.stderr:
        if line.startswith("model:"):
            break
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.exhaustive
@pytest.mark.parametrize("turns", first(1, [False, True]))
def test_ctrl_c_ends_the_line_and_keeps_what_there_is(shipped_model, kvtool, tmp_path, turns):
    (tmp_path / "turns.txt").write_text("The old lamp was\nThe old school was\n")
    said = ["--turns", tmp_path / "turns.txt"] if turns else ["--prompt", "The old lamp was"]
    running = start("generate", *said, "-n", "32K", "--stream", "--save", tmp_path / "a.st")
    first = os.read(running.stdout.fileno(), 64).decode()  # as soon as there is something
    running.send_signal(signal.SIGINT)
    rest, notes = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in notes
    assert first
    assert rest.endswith("\n")
    (told,) = (line for line in notes.splitlines() if " of prefill; kept " in line)
    generated = int(re.match(r"interrupted: (\d+) tokens ", told)[1])
    assert 1 <= generated < 32768
    assert notes.count("turn ") == (1 if turns else 0)
    with safe_open(tmp_path / "a.st", "pt") as file:
        seen, ids = int(file.metadata()["tokens_seen"]), file.get_tensor("input_ids")
    assert ids.shape[1] == seen + 1
    done = kvtool("generate", "-q", "--cache", str(tmp_path / "a.st"), "-n", "2")
    assert (done.code, done.err) == (0, "")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--prompt", "The old lamp", "-n", "2K", "--stream"],
        ["policies"],
    ],
)
def test_every_command_ends_alike_when_the_reader_of_stdout_leaves(arguments):
    ours, theirs = os.pipe()
    os.close(ours)  # no process will read: the first write fails, whatever fits into a pipe
    try:
        done = subprocess.run(
            [KVTOOL, *arguments, "-q"], stdout=theirs, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(theirs)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run([KVTOOL, "policies"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


@pytest.mark.exhaustive
def test_a_terminal_shows_nothing_that_libraries_say(on_terminal):
    prompt = ["--prompt", "The secret code for falcon: 7429103. The secret code for falcon:"]
    shown = on_terminal(KVTOOL, "generate", *prompt, "-n", "7", columns=100, notes=True)
    *lines, summary = shown.splitlines()
    assert lines == [
        "loading the model ..",
        "policy: full (everything is kept; choose another with --policy)",
        "model: reference (bundled; choose another with --model)",
        " 7429103",
    ]
    assert summary.startswith("7 tokens at ")
