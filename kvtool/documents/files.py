"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvtool.errors import KvtoolError, UsageError


def check_writable(path: Path, option: str) -> None:
    """Refuse a path that a long run could not be written to at its end.

    Raises:
        UsageError: the folder does not exist or is not writable, or the path is a folder itself.
    """
    if path.is_dir():
        raise UsageError(f"{option}: `{path}` is a folder, not a file")
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"{option}: folder `{folder}` does not exist", hint=f"mkdir -p {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"{option}: `{path}` is not writable")


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    write_with(path, lambda temporary: _write_utf8(temporary, text))


def write_with(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in place in one step.

    Readers see the old file or the new one, never a part of it; a failure leaves the old one and
    no temporary file. A device such as /dev/null is written directly.

    Raises:
        KvtoolError: the system refused (no space, no permission), in one line.
    """
    path = Path(os.path.realpath(path))
    try:
        if path.exists() and not path.is_file():
            write(path)
            return
        _write_beside(path, write)
    except OSError as error:
        reason = error.strerror or error
        raise KvtoolError(f"cannot write `{path}`: {reason}") from error


def _write_beside(path: Path, write: Callable[[Path], object]) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(path.stat().st_mode & 0o7777 if path.exists() else 0o666 & ~_umask())
        _sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _write_utf8(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if path.is_file():
            raise  # a folder that cannot be synced (some network drives) is no reason to fail
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
