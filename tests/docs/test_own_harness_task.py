"""The page's task for the lm-evaluation-harness runs as it is printed there."""

import re
import shlex
from pathlib import Path

import pytest

import kvtool
from kvtool.cli.main import main

PAGE = Path(__file__).parents[2] / "kvtool" / "evaluation" / "reference.md"


def write_harness_task(folder: Path) -> str:
    """Write the task of the page into a folder, and return the command that runs it."""
    section = PAGE.read_text(encoding="utf-8").split("## Your own questions")[1].split("\n## ")[0]
    (task,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    *_, data = re.findall(r"```json\n(.*?)```", section, re.DOTALL)
    (command,) = re.findall(r"```\n(kvtool eval -t lm-eval.*)\n```", section)
    (folder / "my_tasks").mkdir()
    (folder / "my_tasks" / "boats.yaml").write_text(task)
    (folder / "my_tasks" / "boats.jsonl").write_text(data)
    return command


@pytest.mark.exhaustive
def test_the_harness_task_of_the_page_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval")
    command = write_harness_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(command)[1:], "-q", "--no-plots", "-o", "run"]) == 0, (
        capsys.readouterr().err
    )
    results = kvtool.load_results("run").results
    assert {each.variant for each in results} == {"full", "h2o@256", "snapkv@256"}
    assert {each.task for each in results} == {"lm-eval/boats"}
    assert all(each.n == 1 and each.value is not None for each in results)
