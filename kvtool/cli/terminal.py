"""The two streams of a command: data on stdout, everything else on stderr.

The null device takes the place of standard streams that are closed (`kvtool <&- >&- 2>&-`): else
the next file that is opened gets the stream's number, and what a library prints would be in it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from typer import Exit

from kvtool.errors import printable, visible
from kvtool.processes import started
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvtool.report.kept.text import KeptText

_FIRST_LINE, _LONGEST_WAIT = 10.0, 300.0  # seconds to a line of progress, doubled for each next one


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
        lines: whether a line now and then says how far a long command is, where no bar does.
    """

    data: TextIO
    interactive: bool
    quiet: bool
    progress: bool
    lines: bool = False

    def write(self, text: str) -> None:
        """Print data, at once.

        Raises:
            ReaderGone: no program reads it any more.
        """
        try:
            self.data.write(printable(visible(text) if self.interactive else text))
            self.data.flush()
        except BrokenPipeError as error:
            raise ReaderGone from error

    def note(self, text: str) -> None:
        """Show the person at the terminal something that is not data."""
        if not self.quiet:
            tell(f"{text}\n")

    def loading(self, model: str | None) -> None:
        """Say on a terminal that a model is being loaded, since imports take seconds."""
        if sys.stderr.isatty():
            self.note(f"loading {model or 'the model'} ..")

    def print(self, table: RenderableType) -> None:
        """Print what rich lays out; on a terminal it is as wide as that, and coloured."""
        from rich.console import Console

        from kvtool.cli.tables import Trimmed, Visible

        console = Console(file=self.data, highlight=False)
        console.print(Visible(table) if self.interactive else Trimmed(table), crop=False)


@contextlib.contextmanager
def open_terminal(*, quiet: bool, progress: bool | None) -> Iterator[Terminal]:
    """Keep stdout for data: what a library prints meanwhile, even from C, goes to stderr."""
    first = started().first
    quiet = quiet or not first
    wanted = not quiet and (sys.stderr.isatty() if progress is None else progress)
    lines = not quiet and progress is None and not sys.stderr.isatty()
    for library in ("TRANSFORMERS", "HF_HUB"):  # the hub's client logs each of its attempts
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")  # it reads all packages for one
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # a home that is read-only works, too
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads leave busy cores alone
    with _real_stdout() if first else _nowhere() as data:
        yield Terminal(data, data.isatty(), quiet, wanted, lines)


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
        with contextlib.suppress(OSError):  # reported already, when it was written
            data.close()


def _is_descriptor_1(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 1
    except (AttributeError, OSError, io.UnsupportedOperation):
        return False


class Interruption:
    """Whether Ctrl-C was pressed, asked before an answer and after each of its tokens.

        with Interruption() as interrupted:
            generate(.., stop_when=interrupted)

    The first question takes over the signal: until then, while the prompt is read, Ctrl-C ends the
    command at once, as it does when pressed again. Processes that share a model leave the signal
    alone: they would stop at different tokens.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._before: Any = None

    def __enter__(self) -> Interruption:
        return self

    def __call__(self) -> bool:
        ours = threading.current_thread() is threading.main_thread() and started().count == 1
        # a shell's background jobs ignore the signal
        if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._press)
        return self.pressed

    def exit(self) -> None:
        """End the command with the code of Ctrl-C, if it was pressed."""
        if self.pressed:
            raise Exit(130)

    def _press(self, *unused: object) -> None:
        self.pressed = True
        self.__exit__()

    def __exit__(self, *unused: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None


class TerminalWatcher(Watcher):
    """Shows notes and progress on stderr.

    Attributes:
        terminal: where.
    """

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.shows_progress = terminal.progress
        self.listens = not terminal.quiet

    def note(self, text: str) -> None:
        """Show the person at the terminal a message."""
        self.terminal.note(text)

    def show_kept(self, texts: Sequence[KeptText]) -> None:
        """Print kept texts, in colours or, where there are none, with brackets."""
        from rich.console import Console

        from kvtool.cli.tables import Visible
        from kvtool.report.kept.text import (
            coloured_text,
            in_brackets,
            legend,
            legend_of_brackets,
        )

        console = Console(file=sys.stderr, highlight=False)
        coloured = console.color_system is not None and not console.no_color
        for text in texts:
            tell(f"\n{text.title}: {text.cost}\n")
            if coloured:
                console.print(Visible(legend(text)))
                console.print(Visible(coloured_text(text)))
            else:
                tell(f"{legend_of_brackets(text)}\n{in_brackets(text)}\n")

    @contextlib.contextmanager
    def progress(self, total: int) -> Iterator[Callable[..., None]]:
        """Show a bar with the time left, where something is left to do."""
        if not self.shows_progress or total == 0:
            yield self._lines(total)
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("{task.description}", markup=False),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=total)
            yield lambda text, steps=1: bar.update(task, advance=steps, description=visible(text))

    def _lines(self, total: int) -> Callable[..., None]:
        """Return what is called after each step where no bar is shown."""
        done, wait = 0, _FIRST_LINE
        due = time.monotonic() + wait

        def advance(text: str, steps: int = 1) -> None:
            nonlocal done, wait, due
            done += steps
            if self.terminal.lines and done < total and time.monotonic() >= due:
                self.note(f"{done} of {total} ({done * 100 // total} %): {text}")
                wait = min(2 * wait, _LONGEST_WAIT)
                due = time.monotonic() + wait

        return advance


_REFUSING = ((0, "stdin", os.O_WRONLY), (1, "stdout", os.O_RDONLY))
"""Streams whose data would be lost: reading the one and writing the other stays an error."""


def fill_closed_streams() -> None:
    """Open the null device in place of each closed stream."""
    for number, name, mode in (*_REFUSING, (2, "stderr", os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            if os.open(os.devnull, mode) != number:  # the lowest free number is the closed stream's
                raise
            stream = os.fdopen(number, "r" if number == 0 else "w", closefd=False, encoding="utf-8")
            setattr(sys, name, stream)
