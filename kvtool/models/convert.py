"""Turn a GGUF file into a plain folder that loads in a second."""

from __future__ import annotations

from pathlib import Path

from kvtool.documents.files import write_folder
from kvtool.errors import UsageError
from kvtool.models.folder import (
    check_folder,
    check_hub,
    find_source,
    in_one_line,
    library_output_on_stderr,
)
from kvtool.models.gguf import GgufFile


def find_file(model: str) -> GgufFile:
    """Return the GGUF file that a model's name is for, once all is checked that can be.

    Raises:
        UsageError: there is no such file, or it holds no model.
    """
    check_folder(model)
    gguf = find_source(model).gguf
    if gguf is None:
        raise UsageError(f"`{model}` is no GGUF file", hint="kvtool convert FILE.gguf FOLDER")
    return gguf


def convert(
    model: str, folder: Path, *, dtype: str = "auto", revision: str | None = None, progress: bool
) -> None:
    """Write the model of a GGUF file into a folder, which appears whole or not at all.

    Args:
        model: a file, a folder with one, or `REPO:FILE.gguf`.
        folder: where nothing is, or an empty folder.
        dtype: of the weights, by name; `auto`: the file's own, `bfloat16` where they are packed.
        progress: show on stderr how far it is.

    Raises:
        UsageError, KvtoolError: the file cannot be read, or the folder cannot be written.
    """
    gguf = find_file(model)
    check_hub(model, revision)
    from kvtool.models.checkpoint import bring_here, fill_folder

    with library_output_on_stderr(progress), in_one_line("weights", model, {}):
        found = bring_here(model, gguf, revision)
        write_folder(folder, lambda into: fill_folder(model, found, into, dtype, progress))
