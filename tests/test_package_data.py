"""An installation without the files beside the code says so in one line."""

from pathlib import Path

import pytest

from kvtool.cli.main import main
from kvtool.errors import KvtoolError
from kvtool.models import reference
from kvtool.models.reference import CHECKPOINTS
from kvtool.package_data import data_file
from tests.models.bundled import shipped

FILES = (
    "models/reference/checkpoint",
    "models/reference/checkpoint-trace",
    "evaluation/tasks/longbench_prompts.yaml",
    "report/page.html",
    "report/table.html",
    "report/page.css",
)


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_there(name):
    assert data_file(name).exists()


def test_a_file_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtool.package_data._PACKAGE", tmp_path)
    with pytest.raises(KvtoolError, match=r"installed without its file `report/page\.html`"):
        data_file("report/page.html")


def test_a_command_without_its_model_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reference, "path", shipped)
    monkeypatch.setattr("kvtool.package_data._PACKAGE", tmp_path)
    assert main(["generate", "--policy", "h2o+caote"]) == 1
    told = capsys.readouterr().err.splitlines()[-2:]
    assert told[0] == "error: kvtool was installed without its file `models/reference/checkpoint`"
    assert told[1].startswith("hint: pip install --force-reinstall")


def test_all_files_but_code_and_pages_are_package_data():
    """`tests` of a wheel run in the gate; this one finds a new file whose line is forgotten."""
    package = Path(__file__).parents[1] / "kvtool"
    odd = {
        path.suffix
        for path in package.rglob("*")
        if path.is_file() and not {"__pycache__", *CHECKPOINTS.values()} & set(path.parts)
    }
    assert odd == {".py", ".pyi", ".md", ".yaml", ".css", ".html", ".js", ".typed"} | ({""} & odd)
