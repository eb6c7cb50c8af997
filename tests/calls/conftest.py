import json

import pytest

from kvtool.documents.generation import GenerationDocument
from kvtool.models.load import load
from kvtool.watcher import Watcher


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def loaded():
    """The bundled model as a caller has it: loaded, with its own attention."""
    return load()


@pytest.fixture
def command(capsys):
    """Run a command in this process and return the document that it prints."""
    from kvtool.cli.main import main

    def run(*arguments: str) -> dict:
        capsys.readouterr()
        assert main([*arguments, "-f", "json", "-q"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


class Listening(Watcher):
    """Keeps the notes that it gets."""

    listens = True

    def __init__(self):
        self.told = []

    def note(self, text):
        self.told.append(text)


@pytest.fixture
def listening():
    return Listening()


def timeless(document: dict | GenerationDocument) -> dict:
    """A document's data without what a clock says."""
    data = document if isinstance(document, dict) else document.to_data()
    data = {key: value for key, value in data.items() if key not in ("timing", "saved")}
    if "turns" in data:
        data["turns"] = [timeless(turn) for turn in data["turns"]]
    return data
