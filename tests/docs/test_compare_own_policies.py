"""The page's own scores, checked, compared with three baselines each, and printed as LaTeX.

Code and commands are those of the page; comparisons are made smaller.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest

import kvtool
from kvtool.cli.main import main

README = Path(__file__).parents[2] / "kvtool" / "README.md"
SECTION = README.read_text(encoding="utf-8").split("## Add a policy")[1].split("\n## ")[0]
CODE = [textwrap.dedent(code) for code in re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)]
COMMANDS = [line.strip() for line in SECTION.splitlines() if line.startswith("   kvtool ")]
MODULES = {"my_peak": 0, "my_scores": 1}
SMALL = {"--lengths": "256", "--samples": "2"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, number in MODULES.items():
        (tmp_path / f"{name}.py").write_text(CODE[number])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def smaller(command: str) -> list[str]:
    words = shlex.split(command)[1:]
    for flag, value in SMALL.items():
        if flag in words:
            words[words.index(flag) + 1] = value
    return [*words, "--depths", "3", "-q", "--no-plots"] if "--compare" in words else words


def test_the_commands_were_found():
    kinds = [command.split()[1] for command in COMMANDS]
    assert kinds.count("eval") == 3
    assert sum("--check" in command for command in COMMANDS) == 3
    assert len(CODE) == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", [each for each in COMMANDS if "--check" in each])
def test_the_scores_pass_their_checks(folder, command, capsys):
    assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("run", "scores"), [("runs/peak", ["peak(recent=8)"]), ("runs/scores", ["longest", "dice"])]
)
def test_each_score_is_compared_with_three_baselines_in_latex(folder, run, scores, capsys):
    (command,) = [each for each in COMMANDS if f"-o {run}" in each]
    assert main(smaller(command)) == 0, capsys.readouterr().err
    latex = capsys.readouterr().out
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 2
    assert ":" not in latex.split(r"\begin{tabular}")[1].split(r"\bottomrule")[0]  # no module
    results = kvtool.load_results(run)
    asked = [each for each in results.differences if each.asked]
    named = {each.name: each.shown for each in results.variants}
    assert [(named[each.variant], each.against) for each in asked] == [
        (f"{score}@64", f"{baseline}@64")
        for score in scores
        for baseline in ("h2o", "streaming", "tova")
    ]
    assert {each.comparisons for each in asked} == {len(asked)}
    for score in scores:
        assert f"{score}@64 &" in latex
    again = [each for each in COMMANDS if f"--rescore {run}" in each]
    for command in again:
        assert main([*shlex.split(command)[1:], "-q", "--no-plots"]) == 0
        assert capsys.readouterr().out.startswith("variant,policy,label,")


@pytest.mark.exhaustive
def test_draws_are_those_of_a_text(folder):
    """The seed of a text decides, and a token's number does not depend on its slot."""
    import torch

    from kvtool.policies.draws import drawn_for
    from kvtool.policies.grammar import parse_policy
    from kvtool.policies.slot_view import SlotView

    policy = parse_policy("my_scores:Dice")
    first, second = (drawn_for(policy, text).score for text in ("a", "b"))
    places = torch.arange(200).view(1, 1, 200)

    def numbers(score, positions):
        view = SlotView(values=(), positions=positions, tokens_seen=200, budget=64, held=200)
        return score.importance({}, view, None)

    drawn = numbers(first, places)
    assert torch.equal(drawn.flip(-1), numbers(first, places.flip(-1)))
    assert not torch.equal(drawn, numbers(second, places))
    assert 0.4 < (drawn < 2**23).float().mean() < 0.6  # half of them in the lower half
    assert drawn.unique().numel() == 200


def test_the_entry_point_of_the_page_is_one():
    table = re.search(r"```toml\n(.*?)```", SECTION, re.DOTALL)[1]
    from kvtool.policies.installed import GROUP

    assert f'[project.entry-points."{GROUP}"]\n' in table
    assert re.search(r'^\w+ = "\w+\.\w+:\w+"$', table, re.MULTILINE)


def test_a_question_of_the_page_is_read(tmp_path):
    from kvtool.evaluation.tasks.qa import Questions
    from tests.evaluation.tasks.counters import WORDS

    page = (README.parent / "evaluation" / "reference.md").read_text(encoding="utf-8")
    line = re.search(r"```json\n(.*?)```", page.split("## Your own questions")[1], re.DOTALL)[1]
    (tmp_path / "mine.jsonl").write_text(line)
    (sample,) = Questions(name="qa", data=str(tmp_path / "mine.jsonl")).draw(WORDS)
    assert sample.turns[0].references == tuple(json.loads(line)["answers"])


@pytest.mark.exhaustive
def test_the_task_of_the_page_runs(tmp_path, monkeypatch, capsys):
    section = README.read_text(encoding="utf-8").split("## Add a task")[1]
    (tmp_path / "my_module.py").write_text(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1])
    monkeypatch.chdir(tmp_path)
    words = ["eval", "-t", "my_module:Last", "-s", "eval.tasks.0.samples=2"]
    assert main([*words, "-p", "h2o", "-b", "20", "-f", "json", "-q", "--no-plots"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [each["n"] for each in results] == [2, 2]
    sys.modules.pop("my_module")
