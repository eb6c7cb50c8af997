"""A run's folder: one line per finished sample, so that a killed run goes on where it stopped.

Where several processes share a run, each of them appends to files of its own, `parts/RANK/..`. The
first process moves their lines to where a single process writes, when all are done or, after a run
that broke off, when the next one begins.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kvtool.documents.files import temporaries_of, write_text, writing
from kvtool.documents.readers import load_json
from kvtool.documents.results import SampleRecord
from kvtool.documents.source import reason
from kvtool.errors import KvtoolError, UsageError, printable

Json = dict[str, Any]

_DOCUMENTS = ("results.json", "recipe.lock.yaml", "samples.json", "report.html")


class Store:
    """`samples/VARIANT/TASK.jsonl` and the documents of one run.

    Lines are appended and flushed one by one. A last line that a killed process left unfinished is
    dropped. A record with an `error` counts as not done.

    Attributes:
        folder: of the run, which all processes see.
        process: rank of this one; only 0 writes documents.
        silent: whether nothing is written here, since another process writes the same.
    """

    def __init__(self, folder: Path, process: int = 0, *, silent: bool = False) -> None:
        self.folder, self.process, self.silent = folder, process, silent
        self._parts = folder / "parts"
        self._held: os.stat_result | None = None  # the lock, while this process holds it

    @property
    def own(self) -> Path:
        """The folder whose files this process alone appends to."""
        return self.folder if self.process == 0 else self._parts / str(self.process)

    def path(self, variant: str, task: str) -> Path:
        """Return the file of one variant and task that this process appends to."""
        return self.own / "samples" / variant / f"{task}.jsonl"

    def records(self, variant: str, task: str) -> dict[str, Json]:
        """Return the records of one variant and task by key, the last of each key.

        Raises:
            KvtoolError: a line that is no record, other than an unfinished last one.
        """
        found: dict[str, Json] = {}
        for folder in (self.folder, *self._part_folders()):
            path = folder / "samples" / variant / f"{task}.jsonl"
            if path.is_file():
                found |= _read_records(path)
        return found

    def append(self, variant: str, task: str, record: Json) -> None:
        """Add a record.

        Raises:
            KvtoolError: the folder has gone, or the system refused (no space, no permission).
        """
        if self.silent:
            return
        self._check_there()
        path = self.path(variant, task)
        line = printable(json.dumps(record, ensure_ascii=False, allow_nan=False))
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8", newline="") as file:
                file.write(line + "\n")

    def _check_there(self) -> None:
        """Refuse to make a folder anew that was deleted or replaced meanwhile."""
        if self._held is None:
            return
        try:
            same = os.path.samestat(self._held, os.stat(self.own / ".lock"))
        except OSError:
            same = False
        if not same:
            raise KvtoolError(f"folder `{self.own}` was deleted while the run was writing to it")

    def repair(self) -> None:
        """Put the lines of all processes into one place, and cut off those not finished.

        Raises:
            UsageError: one of those processes still runs.
        """
        for path in (self.folder / "samples").rglob("*.jsonl"):
            _cut_to_whole_lines(path)
        for folder in self._part_folders():
            with self._holding(folder / ".lock"):
                for path in sorted((folder / "samples").rglob("*.jsonl")):
                    _cut_to_whole_lines(path)
                    whole = self.folder / path.relative_to(folder)
                    whole.parent.mkdir(parents=True, exist_ok=True)
                    with whole.open("ab") as file:
                        file.write(path.read_bytes())
                shutil.rmtree(folder)
        with contextlib.suppress(OSError):  # there is none, or it holds what is not a run's
            self._parts.rmdir()

    def _part_folders(self) -> list[Path]:
        return sorted(folder for folder in self._parts.glob("*") if folder.name.isdecimal())

    def write(self, name: str, text: str) -> None:
        """Write a document into the folder, whole or not at all; the first process does.

        Raises:
            KvtoolError: the folder has gone, or the system refused.
        """
        if self.process > 0:
            return
        self._check_there()
        write_text(self.folder / name, text)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold what this process writes to; the system lets go of it when the process ends.

        Raises:
            UsageError: another run holds it, or it cannot be made.
        """
        if self.silent:
            yield
            return
        try:
            self.own.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make folder `{self.own}`: {error.strerror}") from None
        with self._holding(self.own / ".lock"):
            self._held = os.stat(self.own / ".lock")
            try:
                yield
            finally:
                self._held = None

    @contextlib.contextmanager
    def _holding(self, path: Path) -> Iterator[None]:
        lock = FileLock(path)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise UsageError(
                f"another run is writing to `{self.folder}`",
                hint="wait for it, or choose another folder with --output",
            ) from None
        try:
            yield
        finally:
            lock.release()

    def clear(self) -> None:
        """Delete what earlier runs left here, and nothing that is not a run's."""
        self.repair()
        for path in sorted((self.folder / "samples").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        for name in _DOCUMENTS:
            (self.folder / name).unlink(missing_ok=True)
        for path in (self.folder / "plots").glob("*.*"):
            path.unlink()

    def is_empty(self) -> bool:
        """Return whether the folder holds nothing but a lock and half-written files."""
        if not self.folder.is_dir():
            return True
        begun = {".lock", *(path.name for path in self._temporaries())}
        if all(path.is_dir() or path.name == ".lock" for path in self._parts.rglob("*")):
            begun.add(self._parts.name)
        return begun.issuperset(os.listdir(self.folder))

    def sweep(self) -> None:
        """Delete what killed runs have left half written."""
        for path in self._temporaries():
            path.unlink()
        for path in (self.folder / "plots").glob(".*.part"):
            path.unlink()

    def _temporaries(self) -> list[Path]:
        return [path for name in _DOCUMENTS for path in temporaries_of(self.folder / name)]


def _read_records(path: Path) -> dict[str, Json]:
    found = {}
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = load_json(line)
            found[SampleRecord.model_validate(record).key] = record
        except ValueError as error:
            raise KvtoolError(
                f"{path}:{number} is not a record of a sample: {reason(error)}",
                hint="delete that line, or start anew with --overwrite",
            ) from None
    return found


def _cut_to_whole_lines(path: Path) -> None:
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
