"""Files that people name: where they are, and no more of them than is wanted."""

from __future__ import annotations

import re
import stat
import sys
from pathlib import Path
from typing import BinaryIO

from kvtool.errors import UsageError, quote

MOST_BYTES = 64 * 2**20
_DESCRIPTOR = re.compile(r"/dev/(stdin|fd/[0-9]+)|/proc/self/fd/[0-9]+")


def expand(path: str | Path) -> Path:
    """Put a home folder in the place of `~` or `~user`.

    Raises:
        UsageError: there is no such user, or nobody knows the folder; a null byte.
    """
    if "\0" in str(path):
        raise UsageError(f"no path holds a null byte, got {quote(path)}")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise UsageError(
            f"{quote(path)}: no home folder is known for {quote(user)}",
            hint=f"write `./{user}` for a file of that name",
        ) from None


def read_bytes(path: Path, name: str, *, most: int = MOST_BYTES, kind: str = "text") -> bytes:
    """Read a regular file, or what a shell hands over as one (`<(command)`, /dev/stdin).

    Args:
        name: what the file is called in messages.
        most: bytes it may have.
        kind: what it is read as, in words.

    Raises:
        UsageError: a device, a named pipe or a socket, none of which need end; too large.
        OSError: missing, a folder, or not readable.
    """
    mode = path.stat().st_mode
    usual = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
    if not usual and not _DESCRIPTOR.fullmatch(str(path)):
        raise UsageError(f"{name} is no regular file", hint="`-` or /dev/stdin read a pipe")
    with path.open("rb") as stream:
        return _read_some(stream, name, most, kind)


def read_stdin(*, most: int = MOST_BYTES, kind: str = "text") -> bytes:
    """Read stdin to its end.

    Raises:
        UsageError: too much.
    """
    return _read_some(sys.stdin.buffer, "stdin", most, kind)


def _read_some(stream: BinaryIO, name: str, most: int, kind: str) -> bytes:
    data = stream.read(most + 1)
    if len(data) > most:
        raise UsageError(f"{name} is larger than {most // 2**20} MiB, too large for a {kind}")
    return data
