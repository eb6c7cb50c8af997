import io
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kvtool.cli.main import main


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def kvtool(capsys, monkeypatch, tmp_path) -> Callable[..., Done]:
    """Run the command line in this process, inside an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        code = main(arguments)
        return Done(code, *capsys.readouterr())

    return run
