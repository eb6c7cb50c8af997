import contextlib
import io
import os
import re
import subprocess
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
def drawn_pages() -> None:
    """Let the pages of runs have their pictures, which take longer to draw than small runs."""


@pytest.fixture
def kvtool(capsys, monkeypatch, request, tmp_path) -> Callable[..., Done]:
    """Run the command line in this process, inside an empty folder; `drawn_pages` has pictures."""
    monkeypatch.chdir(tmp_path)
    if "drawn_pages" not in request.fixturenames:
        monkeypatch.setattr("kvtool.report.page.pictures", lambda document: [])

    def run(*arguments: str, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        code = main(arguments)
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def on_terminal():
    """Run a command on a terminal of its own and return what it shows, read while it runs."""
    pty = pytest.importorskip("pty")

    def run(*command: str, columns: int, notes: bool = False) -> str:
        ours, theirs = pty.openpty()
        environment = os.environ | {"COLUMNS": str(columns), "TERM": "xterm"}
        errors = theirs if notes else None
        running = subprocess.Popen(command, stdout=theirs, stderr=errors, env=environment)
        os.close(theirs)
        shown = b""
        with contextlib.suppress(
            OSError
        ):  # Linux ends a terminal that no process holds with an error
            while part := os.read(ours, 4096):
                shown += part
        os.close(ours)
        assert running.wait() == 0
        return shown.decode()

    return run


@pytest.fixture
def at_terminal(kvtool, monkeypatch):
    """Run a command in this process with stdout said to be a terminal; colours are left out."""

    def run(*arguments: str, columns: int = 100) -> Done:
        with monkeypatch.context() as patch:
            patch.setattr(sys.stdout, "isatty", lambda: True)
            patch.setenv("COLUMNS", str(columns))
            patch.setenv("TERM", "xterm")
            done = kvtool(*arguments)
        return Done(done.code, re.sub(r"\x1b\[[0-9;]*m", "", done.out), done.err)

    return run


@pytest.fixture
def full_disk():
    """Let no file grow beyond a number of bytes: the system refuses as it does on a full disk."""
    resource = pytest.importorskip("resource")

    @contextlib.contextmanager
    def limit(size: int):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit
