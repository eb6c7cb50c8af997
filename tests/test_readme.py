"""The README keeps its word: its sessions run and print what it says, its tables are complete."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvtool.cli.main import main
from kvtool.policies.table import BASES, MODIFIERS

README = (Path(__file__).parents[1] / "README.md").read_text()


def sessions() -> list[list[tuple[str, str]]]:
    """Of each console block, the commands and what is printed below each."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", README, re.DOTALL | re.MULTILINE):
        steps = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
        found.append([tuple((step + "\n").split("\n", 1)) for step in steps])
    return found


def without_numbers(text: str) -> str:
    """Numbers vary from machine to machine, and with them the widths of tables."""
    text = re.sub(r"[+-]?\d+(\.\d+)?(e-\d+)?", "#", text)
    return re.sub(r"[ ─]+", " ", text).replace(" \n", "\n").strip()


@pytest.mark.few(1)
@pytest.mark.parametrize("session", sessions(), ids=lambda steps: steps[0][0][:40])
def test_sessions_run_as_printed(session, tmp_path):
    scripts = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    for command, printed in session:
        if not command.startswith("kvtool "):
            continue
        done = subprocess.run(
            ["bash", "-c", f"{command} 2>&1"],
            cwd=tmp_path,
            env=environment | {"COLUMNS": "100"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        assert without_numbers(done.stdout) == without_numbers(printed)


def launches() -> list[str]:
    """The commands in several processes that need no model of the reader's."""
    lines = [line for line in README.splitlines() if line.startswith("torchrun ")]
    return [line for line in lines if not re.search(r"\b(MODEL|FOLDER)\b", line)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", launches())
def test_commands_run_in_several_processes(command, tmp_path):
    scripts = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        shlex.split(command), cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def evaluations() -> list[str]:
    """The `kvtool eval` commands outside sessions that need no files of the reader's."""
    lines = [line for line in README.splitlines() if line.startswith("kvtool eval ")]
    return [line for line in lines if not re.search(r"\b(MODEL|FOLDER)\b", line)]


@pytest.mark.few(1)
@pytest.mark.parametrize("command", evaluations())
def test_evaluations_are_understood(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(Path(__file__).parents[1] / "recipes")
    assert main([*shlex.split(command)[1:], "--dry-run", "-q"]) == 0
    assert evaluations()


def test_the_sessions_were_found():
    assert sum(len(steps) for steps in sessions()) >= 3
    assert launches()


def test_the_two_commands_are_there():
    lines = README.splitlines()
    for command in (
        "pip install -c constraints.txt -e . && kvtool generate --policy h2o+caote",
        "pip install -c constraints.txt -e '.[test]' && pytest",
    ):
        assert lines.count(command) == 1


@pytest.mark.parametrize("name", [*BASES, *MODIFIERS])
def test_every_policy_has_a_row(name):
    mark = f"`{name}`" if name in BASES else f"`+{name}`"
    rows = [line.split(" | ")[0] for line in README.splitlines() if line.startswith("| `")]
    assert any(mark in row for row in rows)
