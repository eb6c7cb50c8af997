"""Reading files of rows: JSON Lines, JSON, CSV, Parquet, Arrow and plain text.

JSON and CSV are read with the standard library, since the columns of a benchmark may well mix types
(an answer that is a number here and a list there), which column-wise readers refuse.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

from kvtool.documents.files import digest
from kvtool.errors import KvtoolError, UsageError, did_you_mean

Row = dict[str, Any]
Value = TypeVar("Value")


def check_file(path: Path, *, task: str) -> None:
    """Refuse a path that is no file.

    Raises:
        UsageError: nothing is there; near names in the same folder are suggested.
    """
    if path.is_file():
        return
    if path.is_dir() or not path.parent.is_dir():
        what = f"folder `{path.parent}` does not exist" if not path.exists() else "it is a folder"
        raise UsageError(f"{task}: no file `{path}`: {what}")
    names = sorted(entry.name for entry in path.parent.iterdir())
    raise UsageError(f"{task}: no file `{path}`", hint=did_you_mean(path.name, names))


def find_in_folder(folder: Path, stem: str, *, task: str) -> Path:
    """Return the file of a folder that is called `stem`, whatever its format.

    Raises:
        UsageError: there is none.
    """
    for suffix in READERS:
        if (folder / f"{stem}{suffix}").is_file():
            return folder / f"{stem}{suffix}"
    names = sorted(entry.name for entry in folder.iterdir())
    raise UsageError(
        f"{task}: folder `{folder}` has no `{stem}.jsonl` or other data file of that name",
        hint=f"it has: {', '.join(names[:20])}" if names else "the folder is empty",
    )


def read_file(path: Path, *, task: str) -> tuple[list[Row], str]:
    """Read the rows of one file.

    Returns:
        The rows and the SHA-256 of the file.

    Raises:
        UsageError: there is no such file, or its name ends in no known format.
        KvtoolError: it cannot be read.
    """
    read = READERS.get(path.suffix.lower())
    if read is None and path.is_file():
        raise UsageError(
            f"{task}: `{path}` ends in no known format", hint=f"known: {', '.join(READERS)}"
        )
    return read_by(read or _read_text, path, task=task), digest(path)


def read_by(read: Callable[[Path], Value], path: Path, *, task: str) -> Value:
    """Return what a reader makes of a file.

    Raises:
        UsageError: there is no such file.
        KvtoolError: it cannot be read, with what the reader says of it.
    """
    check_file(path, task=task)
    try:
        return read(path)
    except Exception as error:  # any: of a damaged file, libraries raise what they like
        raise KvtoolError(f"{task}: cannot read `{path}`: {one_line(error)}") from error


@contextmanager
def chatter_on_stderr() -> Iterator[None]:
    """Keep what `datasets` prints away from stdout; its progress bars need a terminal."""
    import datasets

    hide = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    if hide:
        datasets.disable_progress_bars()
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if hide:
            datasets.enable_progress_bars()


def load_text(path: Path) -> str:
    """Return the text of a file in UTF-8."""
    return path.read_bytes().decode("utf-8-sig")


def load_json(path: Path) -> Any:
    """Return the one JSON value that a file holds."""
    return json.loads(load_text(path))


def _read_lines(path: Path) -> list[Row]:
    rows = []
    with path.open("rb") as stream:  # only \n ends a line: a JSON string may hold U+2028
        for number, line in enumerate(stream, 1):
            try:
                text = line.decode("utf-8-sig")
                rows += [json.loads(text)] if text.strip() else []
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
    return _objects(rows)


def _objects(rows: list[Any]) -> list[Row]:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"entry {number} is no JSON object")
    return rows


def _read_json(path: Path) -> list[Row]:
    """Read a list of objects; many a file that is called `.json` is JSON Lines."""
    try:
        value = load_json(path)
    except ValueError:
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
        if len(lines) > 1 and lines[0].rstrip().endswith(b"}"):
            return _read_lines(path)
        raise
    return _objects(value if isinstance(value, list) else [value])


def _read_csv(path: Path) -> list[Row]:
    limit = csv.field_size_limit(sys.maxsize)  # documents are longer than the usual 128 KiB
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = list(csv.DictReader(stream, strict=True))
    finally:
        csv.field_size_limit(limit)
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise ValueError(f"row {number} has another number of fields than the first line")
    return rows


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet  # comes with datasets

    return pyarrow.parquet.read_table(path).to_pylist()


def _read_arrow(path: Path) -> list[Row]:
    import datasets

    return datasets.Dataset.from_file(str(path)).to_list()


def _read_text(path: Path) -> list[Row]:
    text = load_text(path)
    return [{"text": text}] if text.strip() else []


def one_line(error: BaseException) -> str:
    """Return the first 200 characters of what an error says, in one line."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= 200 else words[:199] + "…"


READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".arrow": _read_arrow,
    ".txt": _read_text,
    ".md": _read_text,
}
