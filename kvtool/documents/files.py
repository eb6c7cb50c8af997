"""Read files that users name, and write files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from kvtool.errors import KvtoolError, UsageError, printable, quote

_LONGEST_NAME, _LONGEST_PATH = 255, 4095  # bytes, of what Linux takes
_POINTER = b"version https://git-lfs"
_ROOM = 16  # bytes of a temporary's name beside that of its file


def as_folder(name: str) -> str:
    """Return a name as a folder can carry it.

    >>> as_folder("streaming(sinks=2)@256")
    'streaming_sinks=2_@256'
    """
    return re.sub(r"[^A-Za-z0-9.+@=,%_-]", "_", name)


def check_writable(path: Path, option: str) -> None:
    """Refuse a path that a long run could not be written to at its end: `UsageError`."""
    check_name(path, option)
    if path.is_dir():
        raise UsageError(f"{option}: `{path}` is a folder, not a file")
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"{option}: folder `{folder}` does not exist", hint=f"mkdir -p {folder}")
    real = Path(os.path.realpath(path))
    try:
        if real.exists() and not real.is_file():  # a full device refuses even nothing
            handle = os.open(real, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
            try:
                os.write(handle, b"")
            finally:
                os.close(handle)
        elif not os.access(real if real.exists() else real.parent, os.W_OK):
            raise UsageError(f"{option}: `{path}` is not writable")
        else:
            with tempfile.TemporaryFile(dir=real.parent):
                pass
    except OSError as error:
        if error.errno != errno.ENXIO:  # a pipe without a reader yet
            why = error.strerror or error
            raise UsageError(f"{option}: `{path}` is not writable: {why}") from None


def check_name(path: Path, option: str) -> None:
    """Refuse a path that is longer than the system takes, or a part of it: `UsageError`."""
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    if longest > _LONGEST_NAME or len(os.fsencode(path)) > _LONGEST_PATH:
        limits = f"a file name has at most {_LONGEST_NAME} bytes, a path {_LONGEST_PATH}"
        raise UsageError(f"{option}: {limits}, got {quote(path)}")


def check_unicode(name: str, what: str) -> None:
    """Refuse a name that is not UTF-8, where a document or a tokenizer has to hold it."""
    if name != printable(name):
        message = f"{what} {quote(name)} is not UTF-8"
        raise UsageError(message, hint="rename it, or link to it: ln -s OLD NEW")


def check_downloaded(path: Path) -> None:
    """Refuse a file in whose place Git LFS has put a pointer to it: `UsageError`."""
    with contextlib.suppress(OSError), path.open("rb") as file:  # reading it says more
        if file.read(len(_POINTER)) == _POINTER:
            raise UsageError(
                f"`{path}` is a pointer of Git LFS, and the file itself is not downloaded",
                hint=f"git -C {path.parent} lfs pull",
            )


def temporaries_of(path: Path) -> list[Path]:
    """Files that a killed process has left beside a file that it was writing."""
    mark, end = _temporary_name(path)
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    ours = re.compile(f"{re.escape(mark)}[a-z0-9_]{{8}}{re.escape(end)}")
    return sorted(path.parent / name for name in names if ours.fullmatch(name))


def _temporary_name(path: Path) -> tuple[str, str]:
    """Return how the name of a temporary begins and ends; its middle is drawn at random."""
    name = path.name
    while len(os.fsencode(name)) > _LONGEST_NAME - _ROOM:
        name = name[:-1]
    return f".{name}.", ".part"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in one line why a file cannot be written (no space, no permission)."""
    try:
        yield
    except OSError as error:
        raise KvtoolError(f"cannot write `{path}`: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    plain = printable(text)
    write_with(path, lambda part: part.write_text(plain, encoding="utf-8", newline=""))


def write_with(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in place in one step.

    Readers see the old file or the new one, never a part of it; a failure leaves the old one and
    no temporary file. What writers of the same file that were killed have left is deleted. A device
    such as /dev/null is written directly.

    Raises:
        KvtoolError: the system refused.
    """
    path = Path(os.path.realpath(path))
    with writing(path):
        if path.exists() and not path.is_file():
            write(path)
        else:
            _put(path, write, is_folder=False)


def write_folder(folder: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write the files of a temporary folder, then put it in place as `write_with` does.

    Nothing, or an empty folder, is there before.
    """
    folder = Path(os.path.realpath(folder))
    with writing(folder):
        _put(folder, fill, is_folder=True)


def _put(path: Path, fill: Callable[[Path], object], *, is_folder: bool) -> None:
    handle, temporary = _make_temporary(path, is_folder=is_folder)
    mask = os.umask(0o022)
    os.umask(mask)
    try:
        fill(temporary)
        for file in temporary.iterdir() if is_folder else [temporary]:
            file.chmod(path.stat().st_mode & 0o7777 if path.is_file() else 0o666 & ~mask)
            _sync(file)
        if is_folder:
            temporary.chmod(0o777 & ~mask)
        temporary.replace(path)
    except BaseException:
        _delete(temporary)
        raise
    finally:
        os.close(handle)
    _sync(path.parent)


def _delete(left: Path) -> None:
    if left.is_dir():
        shutil.rmtree(left, ignore_errors=True)
    else:
        left.unlink(missing_ok=True)


def _make_temporary(path: Path, *, is_folder: bool) -> tuple[int, Path]:
    """Make a temporary that is locked as long as its writer lives, whatever ends it.

    Those whose writers are dead, so that no process locks them, are deleted.
    """
    for left in temporaries_of(path):
        with contextlib.suppress(OSError):
            handle = os.open(left, os.O_RDONLY | os.O_NONBLOCK)
            try:
                if lock(handle, wait=False):
                    _delete(left)
            finally:
                os.close(handle)
    mark, end = _temporary_name(path)
    while True:
        if is_folder:
            name = tempfile.mkdtemp(dir=path.parent, prefix=mark, suffix=end)
            handle = os.open(name, os.O_RDONLY)
        else:
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=mark, suffix=end)
        with contextlib.suppress(OSError):  # a file system without locks, where nothing is swept
            lock(handle)
        if os.fstat(handle).st_nlink > 0:
            return handle, Path(name)
        os.close(handle)  # another process has swept it before it was locked


def lock(handle: int, *, wait: bool = True) -> bool:
    """Lock an open file until it is closed; return whether it is, for callers that do not wait.

    Raises:
        OSError: the file system has no locks.
    """
    from filelock import lock_descriptor  # not at the head: most commands lock nothing

    return lock_descriptor(handle, blocking=wait)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if path.is_file():
            raise  # a folder that cannot be synced (some network drives) is no reason to fail
    finally:
        os.close(handle)


MOST_BYTES = 64 * 2**20
_DESCRIPTOR = re.compile(r"/dev/(stdin|fd/[0-9]+)|/proc/self/fd/[0-9]+")


def expand(path: str | Path) -> Path:
    """Put a home folder in the place of `~` or `~user`.

    Raises:
        UsageError: there is no such user, or no known folder; a null byte.
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


def user_cache() -> Path:
    """Return the folder of what kvtool may make anew: in `XDG_CACHE_HOME`, else in `~/.cache`."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(given) if os.path.isabs(given) else expand("~/.cache")
    return home / "kvtool"


def read_bytes(path: Path, name: str, *, most: int = MOST_BYTES, kind: str = "text") -> bytes:
    """Read a regular file, or what a shell hands over as one (`<(command)`, /dev/stdin).

    Args:
        name, kind: what the file is called in messages, and what it is read as.
        most: bytes it may have.

    Raises:
        UsageError: a device, a named pipe or a socket, which may never end; too large.
        OSError: missing, a folder, or not readable.
    """
    mode = path.stat().st_mode
    usual = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
    if not usual and not _DESCRIPTOR.fullmatch(str(path)):
        raise UsageError(f"{name} is no regular file", hint="`-` or /dev/stdin read a pipe")
    with path.open("rb") as stream:
        return _read_some(stream, name, most, kind)


def _read_some(stream: BinaryIO, name: str, most: int, kind: str) -> bytes:
    data = stream.read(most + 1)
    if len(data) > most:
        raise UsageError(f"{name} is larger than {most // 2**20} MiB, too large for a {kind}")
    return data


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    sha = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def check_prompt(text: str, source: str) -> str:
    """Return a prompt as it is; one that is empty or no UTF-8 is refused (`UsageError`)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{source} is not UTF-8: stray byte at character {error.start + 1}",
            hint="convert it, for example with iconv -t UTF-8",
        ) from None
    if not text.strip():
        raise UsageError(f"{source} is empty", hint="give it at least one word")
    return text


def read_prompt(path: str) -> str:
    """Read a prompt file, `-` for stdin. A newline at its end is not part of the prompt.

    Raises:
        UsageError: missing, unreadable, not UTF-8, or empty.
    """
    name, text = read_utf8(path, "prompt file")
    return check_prompt(text.removesuffix("\n").removesuffix("\r"), name)


def read_utf8(
    path: str | Path, what: str, *, most: int = MOST_BYTES, kind: str = "text"
) -> tuple[str, str]:
    """Read a text file; `-`, as text, is stdin. Return what messages call it, and its text.

    Args:
        what: the file in words, such as `prompt file`.
        most, kind: as for `read_bytes`.

    Raises:
        UsageError: missing, unreadable, no regular file, too large or not UTF-8.
    """
    name = "stdin" if path == "-" else f"{what} `{path}`"
    try:
        if path == "-":
            data = _read_some(sys.stdin.buffer, name, most, kind)
        else:
            data = read_bytes(expand(path), name, most=most, kind=kind)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from None
    try:
        return name, data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}",
            hint="convert it, for example with iconv -f LATIN1 -t UTF-8",
        ) from None
