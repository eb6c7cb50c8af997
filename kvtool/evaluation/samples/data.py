"""Find the texts of a benchmark: in a local file or folder, or in a dataset on the hub.

Every reader also returns a fingerprint, which goes into the results: the SHA-256 of a local file,
`name@commit` of a dataset on the hub.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from kvtool.documents.files import digest, expand
from kvtool.errors import KvtoolError, UsageError, did_you_mean
from kvtool.evaluation.samples.data_files import (
    Row,
    chatter_on_stderr,
    find_in_folder,
    load_json,
    one_line,
    read_by,
    read_file,
)

_PARQUET_COPY = "refs/convert/parquet"  # where the hub keeps a copy of what a script would load

PRESETS: dict[str, dict[str, str]] = {
    "pg19": {"hub": "emozilla/pg19", "field": "text"},
    "booksum": {"hub": "kmfoda/booksum", "field": "chapter"},
    "cnn_dailymail": {"hub": "abisee/cnn_dailymail", "config": "3.0.0", "field": "article"},
    "xsum": {"hub": "EdinburghNLP/xsum", "revision": _PARQUET_COPY, "field": "document"},
    "longbench": {"hub": "Xnhyacinth/LongBench"},
    "longbench-v2": {"hub": "zai-org/LongBench-v2", "split": "train"},
    "mrcr": {"hub": "openai/mrcr", "split": "train"},
    "scbench": {"hub": "microsoft/SCBench"},
    "infinitebench": {"hub": "xinrongzhang2022/InfiniteBench"},
    "gsm8k": {"hub": "openai/gsm8k", "config": "main"},
    "math500": {"hub": "HuggingFaceH4/MATH-500"},
    "aime24": {"hub": "HuggingFaceH4/aime_2024", "split": "train"},
    "aime25": {"hub": "math-ai/aime25"},
}

_TEXT_COLUMNS = ("text", "article", "document", "content", "chapter")
_FILE_NAME = re.compile(r"[./~\\]|.*/.*/|.*\.[A-Za-z]\w{0,6}$", re.DOTALL)


class Data(BaseModel):
    """Where data are. A plain string is a preset (`pg19`), a path or a name on the hub.

    Attributes:
        path: a file, or a folder with a file for each task.
        hub: the name of a dataset on the hub (`emozilla/pg19`), or the folder of a local copy.
        config: which part of a dataset on the hub.
        split: which split of a dataset on the hub; `test[:20]` takes the first rows only.
        revision: branch or commit of a dataset on the hub.
        field: the column that holds the text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str | None = None
    hub: str | None = None
    config: str | None = None
    split: str = "test"
    revision: str | None = None
    field: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if isinstance(value, Path):
            return {"path": str(value)}
        if not isinstance(value, str):
            return value
        if value in PRESETS:
            return dict(PRESETS[value])
        if _FILE_NAME.match(value) or Path(value).exists():
            return {"path": value}
        return {"hub": value}

    @model_validator(mode="after")
    def _one_place(self) -> Data:
        if bool(self.path) == bool(self.hub):
            got = "both" if self.path else "neither"
            raise UsageError(f"data is one of path and hub, got {got}")
        return self

    def __str__(self) -> str:
        """Return the path, or the name on the hub with the config."""
        return self.path or "/".join(filter(None, (self.hub, self.config)))


@dataclass(frozen=True)
class Rows:
    """Rows as they were read.

    Attributes:
        rows: a dictionary each.
        fingerprint: identifies these data.
        columns: the names in any row, in order.
        source: what to call the data in an error.
    """

    rows: list[Row]
    fingerprint: str
    columns: list[str]
    source: str

    def require(self, columns: Sequence[str]) -> None:
        """Check that every row has every column.

        Raises:
            KvtoolError: one that is lacking, with the columns there are.
        """
        for number, row in enumerate(self.rows, 1):
            lacking = next((column for column in columns if column not in row), None)
            if lacking is not None:
                raise KvtoolError(
                    f"`{self.source}` row {number} lacks column `{lacking}`; "
                    f"there are: {', '.join(self.columns)}"
                )

    def first_of(self, names: Sequence[str]) -> str:
        """Return the name by which the data have a column that is published under several."""
        name = next((name for name in names if name in self.columns), names[0])
        self.require([name])
        return name


def read_rows(
    data: Data, required: Sequence[str] = (), *, task: str, stem: str | None = None
) -> Rows:
    """Read all rows of a file or a dataset.

    Args:
        required: columns that every row must have.
        task: the task's name, for errors.
        stem: name of the task's file in a folder; by default the last part of the task's name.

    Raises:
        UsageError: there is no such file, or it is of no known format.
        KvtoolError: it cannot be read, is empty, or a column is lacking.
    """
    if data.path is None:
        rows, fingerprint = _from_hub(data, task)
        source = str(data)
    else:
        path = expand(data.path)
        if path.is_dir():
            path = find_in_folder(path, stem or task.rpartition("/")[2], task=task)
        rows, fingerprint = read_file(path, task=task)
        source = path.name
    if not rows:
        raise KvtoolError(f"{task}: `{source}` is empty")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Rows(rows, fingerprint, columns, source)
    table.require(required)
    return table


def read_json(data: Data, *, task: str) -> tuple[Any, str]:
    """Return what one JSON file holds, a list or a dictionary, and the SHA-256 of the file."""
    if data.path is None:
        raise UsageError(
            f"{task}: needs a JSON file, got `{data}` on the hub", hint=f"--data {task}=FILE"
        )
    path = expand(data.path)
    return read_by(load_json, path, task=task), digest(path)


def documents(data: Data, *, task: str) -> tuple[list[tuple[str, str]], str]:
    """Read texts: the rows of a file or a dataset, or the text files of a folder.

    The text is in the column `data.field`, by default in the only one of text, article, document,
    content and chapter. Empty texts are left out.

    Returns:
        A name and the text of each, and the fingerprint of all.

    Raises:
        UsageError: no such file, no such column, several columns that may be meant.
        KvtoolError: data that cannot be read, or without any text.
    """
    if data.path is not None and expand(data.path).is_dir():
        return _text_files(expand(data.path), task)
    table = read_rows(data, task=task)
    field = _text_column(data, table, task)
    rows = [(str(index), row.get(field) or "") for index, row in enumerate(table.rows)]
    texts = [(name, text) for name, text in rows if not isinstance(text, str) or text.strip()]
    if not texts or not all(isinstance(text, str) for _, text in texts):
        what = "holds something else than" if texts else "has no"
        raise KvtoolError(f"{task}: column `{field}` of `{table.source}` {what} text")
    return texts, table.fingerprint


def _text_files(folder: Path, task: str) -> tuple[list[tuple[str, str]], str]:
    texts, sha = [], hashlib.sha256()
    for file in sorted(folder.glob("*.txt")):
        rows, fingerprint = read_file(file, task=task)
        texts += [(file.name, row["text"]) for row in rows]
        sha.update(f"{file.name} {fingerprint}\n".encode())
    if not texts:
        raise UsageError(
            f"{task}: folder `{folder}` has no text files (.txt) that hold any text",
            hint="name one file of it",
        )
    return texts, sha.hexdigest()


def _text_column(data: Data, table: Rows, task: str) -> str:
    """Return the column that holds the text: the one named, that of a preset, or the only one."""
    named = (preset for preset in PRESETS.values() if preset["hub"] == data.hub)
    field = data.field or next((preset.get("field") for preset in named), None)
    found = [each for each in ([field] if field else _TEXT_COLUMNS) if each in table.columns]
    if len(found) == 1:
        return found[0]
    which = f"may be any of {', '.join(found)}" if found else f"is not `{field}`" if field else ""
    raise UsageError(
        f"{task}: the text column of `{table.source}` {which or 'is not known'}",
        hint=f"set `field` of the data to one of: {', '.join(table.columns)}",
    )


def _from_hub(data: Data, task: str) -> tuple[list[Row], str]:
    import datasets

    try:
        with chatter_on_stderr():
            builder = datasets.load_dataset_builder(data.hub, data.config, revision=data.revision)
            builder.download_and_prepare()
            rows = builder.as_dataset(split=data.split).to_list()
    except Exception as error:  # the client passes on whatever its layers raise
        raise KvtoolError(
            f"{task}: cannot load `{data}` from the hub: {one_line(error)}",
            hint=_hub_hint(data, error, task),
        ) from error
    return rows, f"{data.hub}@{builder.hash}"


def _hub_hint(data: Data, error: Exception, task: str) -> str:
    if "script" in str(error) and data.revision != _PARQUET_COPY:
        return f"set `revision: {_PARQUET_COPY}` of the data, where the hub keeps a copy"
    near = did_you_mean(data.hub or "", PRESETS)
    here = f"download a file and pass `--data {task}=FILE`"
    return f"{near[:-1]}, or {here}" if near else here
