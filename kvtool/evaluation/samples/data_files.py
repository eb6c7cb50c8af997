"""Reading files of rows: JSON Lines, JSON, CSV, Parquet, Arrow and plain text.

JSON and CSV are read with the standard library, since the columns of a benchmark may well mix types
(an answer that is a number here and a list there), which column-wise readers refuse.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from kvtool.errors import KvtoolError, UsageError, did_you_mean

Row = dict[str, Any]


def check_file(path: Path, *, task: str) -> None:
    """Refuse a path that is no file.

    Raises:
        UsageError: nothing is there; near names in the same folder are suggested.
    """
    if path.is_dir():
        raise UsageError(f"{task}: `{path}` is a folder, not a file")
    if path.is_file():
        return
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"{task}: no file `{path}`: folder `{folder}` does not exist")
    raise UsageError(
        f"{task}: no file `{path}`",
        hint=did_you_mean(path.name, sorted(entry.name for entry in folder.iterdir())),
    )


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
        KvtoolError: it cannot be read, with the line that is wrong.
    """
    check_file(path, task=task)
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise UsageError(
            f"{task}: `{path}` ends in no known format", hint=f"known: {', '.join(READERS)}"
        )
    try:
        return read(path), digest(path)
    except OSError as error:
        raise KvtoolError(f"{task}: cannot read `{path}`: {error.strerror or error}") from error


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    sha = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def load_json(path: Path) -> Any:
    """Return the one JSON value that a file holds.

    Raises:
        KvtoolError: it is not JSON, with the line that is wrong.
    """
    text = decode_text(path.read_bytes(), path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise KvtoolError(f"`{path}` line {error.lineno} is not JSON: {error.msg}") from None


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


def _read_lines(path: Path) -> list[Row]:
    rows = []
    with path.open("rb") as stream:  # only \n ends a line: a JSON string may hold U+2028
        for number, line in enumerate(stream, 1):
            text = decode_text(line, path, number)
            if text.strip():
                rows.append(_read_line(text, path, number))
    return rows


def _read_line(text: str, path: Path, number: int) -> Row:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise KvtoolError(f"`{path}` line {number} is not JSON: {error.msg}") from None
    if not isinstance(row, dict):
        raise KvtoolError(f"`{path}` line {number} is no JSON object")
    return row


def _read_json(path: Path) -> list[Row]:
    """Read a list of objects; many a file that is called `.json` is JSON Lines."""
    try:
        value = load_json(path)
    except KvtoolError:
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
        if len(lines) > 1 and lines[0].rstrip().endswith(b"}"):
            return _read_lines(path)
        raise
    rows = value if isinstance(value, list) else [value]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise KvtoolError(f"`{path}`: entry {number} of the list is no JSON object")
    return rows


def _read_csv(path: Path) -> list[Row]:
    limit = csv.field_size_limit(sys.maxsize)  # documents are longer than the usual 128 KiB
    reader = csv.DictReader(
        io.StringIO(decode_text(path.read_bytes(), path), newline=""), strict=True
    )
    try:
        rows = []
        for row in reader:
            if None in row or None in row.values():
                raise KvtoolError(
                    f"`{path}` line {reader.line_num} has another number of fields than line 1"
                )
            rows.append(dict(row))
        return rows
    except csv.Error as error:
        raise KvtoolError(f"`{path}` line {reader.line_num} is not CSV: {error}") from None
    finally:
        csv.field_size_limit(limit)


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet  # comes with datasets

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise KvtoolError(f"`{path}` is not Parquet: {one_line(error)}") from error


def _read_arrow(path: Path) -> list[Row]:
    import datasets
    import pyarrow

    try:
        return datasets.Dataset.from_file(str(path)).to_list()
    except (pyarrow.ArrowException, OSError) as error:
        raise KvtoolError(f"`{path}` is not an Arrow stream: {one_line(error)}") from error


def _read_text(path: Path) -> list[Row]:
    text = decode_text(path.read_bytes(), path)
    return [{"text": text}] if text.strip() else []


def one_line(error: BaseException) -> str:
    """Return the first 200 characters of what an error says, in one line."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= 200 else words[:199] + "…"


def decode_text(data: bytes, path: Path, line: int | None = None) -> str:
    """Decode UTF-8, or say in which line of a file it is none."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = line or data[: error.start].count(b"\n") + 1
        byte = data[error.start]
        raise KvtoolError(f"`{path}` line {at} is not UTF-8: byte 0x{byte:02x}") from None


READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".arrow": _read_arrow,
    ".txt": _read_text,
    ".md": _read_text,
}
