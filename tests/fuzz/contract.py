"""What every input must end in: success, or a `KvtoolError` of one line, soon and in little memory.

Time is that of the processor, so that a busy machine finds no faults; waiting has a limit, too.
"""

from __future__ import annotations

import contextlib
import io
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal
from unittest.mock import patch

from typer.main import get_command

from kvtool.cli.main import app, main
from kvtool.errors import KvtoolError

SECONDS = 5.0  # of the processor
WAIT = 60.0  # seconds in all
BYTES = 2**30
_LINE = 1500  # characters of one line of a message
_LINES = 3 * 20 + 2  # 20 mistakes of a document with their lines, the rest, the hint

Case = Callable[[], object]


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        verdict: `fault` is whatever breaks the contract.
        bytes: how much the process grew at most meanwhile; 0 where the system does not say.
        told: the message, or what went wrong.
    """

    verdict: Literal["success", "refused", "fault"]
    seconds: float
    bytes: int
    told: str = ""


class Refused(Exception):
    """A command has ended with a message and an exit code of its own."""


class TooLong(BaseException):
    """The time of a case is over; no `except Exception` may swallow it."""


def run_case(case: Case) -> Outcome:
    """Run a case under the watch of the contract."""
    before, start = _reset_peak(), time.process_time()
    verdict, told = "success", ""
    try:
        with _alarm():
            try:
                case()
            except KvtoolError as error:
                verdict, told = _judge(error.report(), error.hint)
            except Refused as error:
                verdict, told = _judge(str(error), None)
    except TooLong as error:
        verdict, told = "fault", str(error)
    except BaseException as error:
        verdict, told = "fault", _where(error)
    seconds, grown = time.process_time() - start, max(0, _peak() - before)
    if verdict != "fault" and seconds > SECONDS:
        verdict, told = "fault", f"{seconds:.1f} s: {told}"
    if verdict != "fault" and grown > BYTES:
        verdict, told = "fault", f"{grown / 2**20:.0f} MiB: {told}"
    return Outcome(verdict, seconds, grown, told)


def command(*arguments: str) -> str:
    """Run `kvtool` in this process and return its data.

    Raises:
        Refused: it ended with a message.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        patch("kvtool.cli.main.app", _built()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = main(arguments)
    if code == 0:
        return out.getvalue()
    told = err.getvalue()
    lines = told.splitlines()
    if any(line.startswith("hint: report it with") for line in lines):
        raise AssertionError(f"nobody foresaw: {told}")
    if code not in (1, 2, 3, 4) or (code < 3 and not any("error: " in line for line in lines)):
        raise AssertionError(f"exit code {code}: {told}")
    raise Refused("\n".join(line for line in lines if not line.startswith("model: ")))


@cache
def _built() -> object:
    """The command line as Typer builds it for every call, which takes longer than most cases."""
    return get_command(app)


def _judge(message: str, hint: str | None) -> tuple[Literal["refused", "fault"], str]:
    """Hold a message against the contract: short lines, not many, that a terminal can print."""
    lines = [*message.splitlines(), *([hint] if hint else [])]
    try:
        message.encode()
        (hint or "").encode()
    except UnicodeEncodeError:
        return "fault", f"cannot be printed: {message!a:.300}"
    if not message.strip():
        return "fault", "an empty message"
    if len(lines) > _LINES or max(map(len, lines)) > _LINE:
        return "fault", f"{len(lines)} lines of up to {max(map(len, lines))}: {message:.300}"
    return "refused", message


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/kvtool/" in frame.filename] or frames
    place = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"
    return f"{type(error).__name__} at {place}: {str(error)!a:.300}"


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    """Break a case off that takes too long, as soon as it runs Python again."""

    def ring(number: int, _: object) -> None:
        waited = number == signal.SIGALRM
        raise TooLong(f"waits {WAIT:g} s" if waited else f"more than {SECONDS:g} s")

    clocks = [
        (signal.SIGALRM, signal.ITIMER_REAL, WAIT),
        (signal.SIGPROF, signal.ITIMER_PROF, SECONDS),
    ]
    before = [signal.signal(number, ring) for number, _, _ in clocks]
    for _, clock, seconds in clocks:
        signal.setitimer(clock, seconds)
    try:
        yield
    finally:
        for (number, clock, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(clock, 0)
            signal.signal(number, handler)


def _reset_peak() -> int:
    """Let the system count the peak of memory anew; return where it is now, in bytes."""
    with contextlib.suppress(OSError):  # elsewhere only peaks above all earlier ones are seen
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
