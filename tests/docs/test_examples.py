"""The example scripts print what they say that they print."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.models.bundled import shipped

EXAMPLES = Path(__file__).parents[2] / "recipes" / "examples"


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_prints_what_it_says(script, tmp_path):
    promised = re.search(r"\nprints\n\n(.*?)\n\"\"\"", script.read_text(), re.DOTALL)[1]
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip("\n") == textwrap.dedent(promised).strip("\n")


@pytest.mark.exhaustive
def test_policies_are_compared_on_a_text_of_the_readers(tmp_path):
    text = "The green lamp was near the school. Olga returned a robin at the museum. " * 90
    (tmp_path / "mine.txt").write_text(text)
    script = EXAMPLES / "compare_policies.py"
    done = subprocess.run(
        [sys.executable, str(script), "mine.txt", str(shipped())],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^full +1.00 +100%$", done.stdout, re.MULTILINE)


@pytest.mark.exhaustive
def test_processes_of_ray_share_a_run(tmp_path):
    pytest.importorskip("ray")
    script = str(EXAMPLES.parent / "eval_on_ray.py")
    asked = ["-t", "niah", "-p", "h2o", "-b", "64", "--lengths", "256", "--samples", "1"]
    values = []
    for command in ([script, "2"], ["-m", "kvtool", "eval"]):
        folder = tmp_path / f"run{len(values)}"
        done = subprocess.run(
            [sys.executable, *command, *asked, "-o", str(folder)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        results = json.loads((folder / "results.json").read_text())["results"]
        values.append([(result["variant"], result["value"]) for result in results])
    assert values[0] == values[1]


def notebook_cells() -> list[dict]:
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["language_info"]["name"]) == (4, "python")
    return notebook["cells"]


@pytest.mark.exhaustive
def test_the_notebook_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "__main__"}
    for cell in notebook_cells():
        if cell["cell_type"] != "code":
            continue
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
        shown = "".join(line for output in cell["outputs"] for line in output["text"])
        assert capsys.readouterr().out == shown


def test_the_notebook_is_one_that_readers_open():
    """Its cells have the keys of nbformat 4.5, and its links lead somewhere."""
    cells = notebook_cells()
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        keys = {"cell_type", "id", "metadata", "source"}
        more = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == keys | more
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", "".join(cell["source"])):
            assert (EXAMPLES / target).exists(), target
