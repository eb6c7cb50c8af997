"""The two streams: data on stdout, everything else on stderr, whatever a library prints."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from kvtool.cli.control_characters import visible
from kvtool.errors import printable
from kvtool.processes import started

if TYPE_CHECKING:
    from rich.console import RenderableType


def tell(text: str) -> None:
    """Print on stderr, at once."""
    sys.stderr.write(printable(visible(text) if sys.stderr.isatty() else text))
    sys.stderr.flush()


class ReaderGone(Exception):
    """Whoever read stdout has left; no `OSError`, which typer would end with a code of its own."""


@dataclass(frozen=True)
class Terminal:
    """Where a command prints.

    Attributes:
        data: the real stdout.
        interactive: whether a person reads `data`.
        quiet: whether notes are dropped.
        progress: whether progress bars are wanted.
    """

    data: TextIO
    interactive: bool
    quiet: bool
    progress: bool

    def write(self, text: str) -> None:
        """Print data, at once.

        Raises:
            ReaderGone: nobody reads it any more.
        """
        try:
            self.data.write(printable(visible(text) if self.interactive else text))
            self.data.flush()
        except BrokenPipeError as error:
            raise ReaderGone from error

    def note(self, text: str) -> None:
        """Tell the person at the terminal something that is not data."""
        if not self.quiet:
            tell(f"{text}\n")

    def note_any(self, text: str | None) -> None:
        """Tell the person at the terminal something, if there is something to tell."""
        if text is not None:
            self.note(text)

    def print(self, table: RenderableType) -> None:
        """Print what rich lays out; on a terminal it is as wide as that, and coloured."""
        from rich.console import Console

        from kvtool.cli.tables import Visible

        console = Console(file=self.data, highlight=False)
        console.print(Visible(table) if self.interactive else table)


@contextlib.contextmanager
def open_terminal(*, quiet: bool, progress: bool | None) -> Iterator[Terminal]:
    """Keep stdout for data: what a library prints meanwhile, even from C, goes to stderr."""
    first = started().first
    quiet = quiet or not first
    wanted = not quiet and (sys.stderr.isatty() if progress is None else progress)
    for library in ("TRANSFORMERS", "HF_HUB"):  # the hub's client tells each of its attempts
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")  # it reads all packages for one
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # a home that is read-only works, too
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads leave busy cores alone
    with _real_stdout() if first else _nowhere() as data:
        yield Terminal(data, data.isatty(), quiet, wanted)


@contextlib.contextmanager
def _nowhere() -> Iterator[TextIO]:
    """Print nothing as data: of several processes, the first one does."""
    with _real_stdout(), open(os.devnull, "w", encoding="utf-8") as data:
        yield data


@contextlib.contextmanager
def _real_stdout() -> Iterator[TextIO]:
    real = sys.stdout
    if not _is_descriptor_1(real):
        with contextlib.redirect_stdout(sys.stderr):
            yield real
        return
    real.flush()
    kept = os.dup(1)
    data = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace", newline="")
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield data
        data.flush()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        with contextlib.suppress(OSError):  # told already, when it was written
            data.close()


def _is_descriptor_1(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 1
    except (AttributeError, OSError, io.UnsupportedOperation):
        return False
