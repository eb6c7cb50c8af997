"""Ten kills at random writes of five commands: nothing is lost, nothing differs in the end."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from kvtool.documents.files import temporaries_of
from kvtool.documents.results import ResultsDocument

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes")

PROGRAM = Path(__file__).with_name("killing.py")
OLD = b"what was there before\n"
PROMPT = ("--prompt", "The secret code for falcon: 7429103. The old lamp was near the school.")
COMMANDS = {  # what writes, and how many of the ten kills it gets
    "eval -t niah --lengths 192 --depths 2 --no-plots -p streaming,h2o -b 32 -f json -o run": 4,
    "generate -p h2o -b 16 -n 6 --save a.st -o a.json": 2,
    "compress -p snapkv -b 40 --save b.st -o b.json": 1,
    "profile --tokens 64 --samples 1 --metrics entropy,key_basis -o c.yaml": 2,
    "plan-budget -b 64 --context 1K -o d.yaml": 1,
}
SEED = 14


@pytest.fixture(scope="module")
def run():
    """Run a command in a folder, killed at a write or not; its exit code and its writes."""
    with subprocess.Popen(
        [sys.executable, PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as program:

        def run(folder, arguments, kill_at=None, bytes=None):
            request = {"folder": str(folder), "arguments": arguments, "kill_at": kill_at}
            request |= {"bytes": bytes}
            program.stdin.write(json.dumps(request) + "\n")
            program.stdin.flush()
            return json.loads(program.stdout.readline())

        yield run
        program.stdin.close()


def content(path):
    """What a file says but for times, bytes of memory and the file's own digest of these."""
    if path.suffix == ".st" or path.name.endswith(".safetensors"):
        return {name: tensor.tolist() for name, tensor in load_file(path).items()}
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return sorted(json.dumps({k: v for k, v in line.items() if k != "cost"}) for line in lines)
    if path.name == "results.json":
        results = ResultsDocument(**json.loads(path.read_text()))
        assert results.complete
        return {(r.variant, r.task): (r.value, r.n, r.failed, r.stderr) for r in results.results}
    if path.suffix == ".json":
        data = json.loads(path.read_text())
        return {
            name: value for name, value in data.items() if name not in ("timing", "environment")
        }
    return None if path.suffix == ".html" else path.read_bytes()


def contents(folder):
    """All files of a folder, temporaries that a killed command has left included."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): content(path) for path in files}


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[0])
def test_a_killed_command_leaves_whole_files_and_ends_as_an_unbroken_one(run, tmp_path, command):
    arguments, kills = [*command.split(), "-q"], COMMANDS[command]
    if arguments[0] in ("generate", "compress"):
        arguments += PROMPT
    runs = arguments[0] == "eval"
    unbroken = tmp_path / "unbroken"
    unbroken.mkdir()
    code, writes = run(unbroken, arguments)
    assert (code, writes > 3) == (0, True)
    whole = contents(unbroken)
    draw = random.Random(f"{SEED} {arguments[0]}")
    for moment in draw.sample(range(1, writes + 1), kills):
        folder = tmp_path / str(moment)
        folder.mkdir()
        if not runs:
            for name in whole:
                (folder / name).write_bytes(OLD)
        assert run(folder, arguments, moment) == [-9, moment - 1]
        if not runs:  # the old file or the new one, and never a part of it
            for name in whole:
                old = (folder / name).read_bytes() == OLD
                assert old or content(folder / name) == whole[name]
        assert run(folder, arguments)[0] == 0
        assert contents(folder) == whole


SAVES = {  # the file whose tensors are being written when the command is killed
    "generate -p h2o -b 16 -n 6 --save a.st -o a.json": "a.st",
    "compress -p snapkv -b 40 --save b.st -o b.json": "b.st",
    "profile --tokens 64 --samples 1 --metrics entropy,key_basis -o c.yaml": "c.heads.safetensors",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", SAVES, ids=lambda command: command.split()[0])
def test_a_kill_in_the_middle_of_the_tensors_loses_nothing_and_is_swept(run, tmp_path, command):
    arguments, name = [*command.split(), "-q"], SAVES[command]
    if arguments[0] != "profile":
        arguments += PROMPT
    path = tmp_path / name
    assert run(tmp_path, arguments)[0] == 0
    whole, size = contents(tmp_path), path.stat().st_size
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    for share in (0.1, 0.5, 0.9):
        path.write_bytes(OLD)
        limit = header + int(share * (size - header))
        assert run(tmp_path, arguments, bytes=limit)[0] == -signal.SIGXFSZ
        assert path.read_bytes() == OLD
        (left,) = temporaries_of(path)
        assert left.stat().st_size == limit, "killed in the middle of the write"
        assert set(os.listdir(tmp_path)) == {*whole, left.name}
        assert run(tmp_path, arguments)[0] == 0
        assert contents(tmp_path) == whole
