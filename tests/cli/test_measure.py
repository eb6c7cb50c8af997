"""The program that measures the documents' numbers again."""

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtool.cli.main import main
from kvtool.evaluation.run.index import read_results_file

FILE = Path(__file__).parents[2] / "recipes" / "measure.py"
SPEC = importlib.util.spec_from_file_location("measure", FILE)
MEASURE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(MEASURE)


@pytest.mark.parametrize("name", MEASURE.RUNS)
def test_every_run_is_one_that_can_be_made(name, kvtool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = kvtool("eval", *MEASURE.RUNS[name], "--limit", "1", "--dry-run", "-q")
    assert done.code == 0, done.err


def test_a_run_is_measured_and_its_table_printed(tmp_path, monkeypatch, capsys):
    small = ("-t", "niah", "-p", "h2o", "-b", "48,64", "--lengths", "128", "--depths", "3")
    monkeypatch.setattr(MEASURE, "RUNS", {"small": (*small, "--no-plots")})

    def run(command, check, stdout):
        assert command[:3] == [sys.executable, "-m", "kvtool"]
        assert (main(command[3:]), check) == (0, True)
        capsys.readouterr()

    monkeypatch.setattr(MEASURE, "subprocess", SimpleNamespace(run=run, DEVNULL=None))
    MEASURE.main(["small", "--folder", str(tmp_path / "runs")])
    values = {
        result.variant: f"{result.value:.2f}"
        for result in read_results_file(tmp_path / "runs/small/results.json").results
    }
    assert capsys.readouterr().out == (
        "\n## small\n\nbudgets 48 / 64; n = 3\n| policy | niah |\n| --- | --- |\n"
        f"| `full` | {values['full']} |\n| `h2o` | {values['h2o@48']} / {values['h2o@64']} |\n"
    )


def test_other_names_are_refused(capsys):
    with pytest.raises(SystemExit):
        MEASURE.main(["nothing"])
    assert "no run named nothing; choose from results" in capsys.readouterr().err


def test_documents_name_runs_that_there_are():
    home = FILE.parents[1]
    pages = [*home.glob("recipes/*.md"), *home.glob("kvtool/**/*.md"), home / "README.md"]
    commands = re.findall(
        r"recipes/measure\.py((?:\s+[a-z-]+)*)(?=`|$)",
        "\n".join(page.read_text() for page in pages),
        re.MULTILINE,
    )
    named = {name for command in commands for name in command.split()}
    assert {"results", "turns-later", "readers"} <= named <= set(MEASURE.RUNS)
