"""A run's folder: one line per finished sample, so that a killed run goes on where it stopped."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtool.documents.files import write_text
from kvtool.errors import KvtoolError, UsageError

try:
    import fcntl
except ImportError:  # no advisory locks on this system: two runs in one folder go unnoticed
    fcntl = None

Json = dict[str, Any]


class Store:
    """`samples/ARM/TASK.jsonl` and the documents of one run.

    Lines are appended and flushed one by one. A last line that a killed process left unfinished is
    dropped. A record with an `error` counts as not done.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, arm: str, task: str) -> Path:
        """Return the file of one arm and task."""
        return self.folder / "samples" / arm / f"{task}.jsonl"

    def records(self, arm: str, task: str) -> dict[str, Json]:
        """Return the records of one arm and task by key, the last of each key.

        Raises:
            KvtoolError: a line that is no record, other than an unfinished last one.
        """
        path = self.path(arm, task)
        if not path.is_file():
            return {}
        found = {}
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], start=1):
            try:
                record = json.loads(line)
                found[record["key"]] = record
            except (ValueError, KeyError, TypeError):
                raise KvtoolError(
                    f"{path}:{number} is not a record of a sample",
                    hint="delete that line, or start anew with --overwrite",
                ) from None
        return found

    def append(self, arm: str, task: str, record: Json) -> None:
        """Add a record."""
        path = self.path(arm, task)
        path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(record, ensure_ascii=False, allow_nan=False)
        with path.open("a", encoding="utf-8", newline="") as file:
            file.write(line + "\n")

    def mend(self) -> None:
        """Cut off last lines that were not finished, so that the next ones stand alone."""
        for path in (self.folder / "samples").rglob("*.jsonl"):
            with path.open("r+b") as file:
                content = file.read()
                whole = content.rfind(b"\n") + 1
                if whole < len(content):
                    file.truncate(whole)

    def write(self, name: str, text: str) -> None:
        """Write a document into the folder, whole or not at all."""
        write_text(self.folder / name, text)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process; the system lets go of it when the process ends.

        Raises:
            UsageError: another run holds it, or it cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make folder `{self.folder}`: {error.strerror}") from None
        with (self.folder / ".lock").open("a") as file:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise UsageError(
                        f"another run is writing to `{self.folder}`",
                        hint="wait for it, or choose another folder with --output",
                    ) from None
            yield

    def clear(self) -> None:
        """Delete what earlier runs left here, and nothing that is not a run's."""
        for path in sorted((self.folder / "samples").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        for name in ("results.json", "recipe.lock.yaml", "samples.json", "report.html"):
            (self.folder / name).unlink(missing_ok=True)
        for path in (self.folder / "plots").glob("*.*"):
            path.unlink()

    def is_empty(self) -> bool:
        """Whether nothing is in the folder but perhaps a lock."""
        return not self.folder.is_dir() or all(name == ".lock" for name in os.listdir(self.folder))
