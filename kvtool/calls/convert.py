"""The settings of `kvtool convert`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from kvtool.documents.files import check_name, expand
from kvtool.documents.settings import Dtype, Flag
from kvtool.errors import UsageError
from kvtool.models.load import convert, find_file

_USAGE = "kvtool convert FILE.gguf FOLDER"


@dataclass(frozen=True, kw_only=True)
class ConvertSettings:
    """Which file is converted, where to, and how much is said of it."""

    file: Annotated[
        str | None,
        Flag(
            metavar="FILE.gguf|REPO:FILE.gguf", help="A GGUF file, or the name of one on the hub."
        ),
    ] = None
    folder: Annotated[str | None, Flag(metavar="FOLDER", help="A folder to make.")] = None
    dtype: Annotated[
        Dtype,
        Flag(
            "--dtype",
            metavar="DTYPE",
            help="Of the weights: float32, bfloat16 or float16; auto is the file's own, and "
            "bfloat16 where they are packed.",
        ),
    ] = "auto"
    revision: Annotated[
        str | None,
        Flag("--revision", metavar="REV", help="Branch, tag or commit of a file on the hub."),
    ] = None
    quiet: Annotated[bool, Flag("--quiet -q", help="Say nothing but errors.")] = False
    progress: Annotated[
        bool | None,
        Flag("--progress/--no-progress", help="Progress bars.  [default: on a terminal]"),
    ] = None
    debug: Annotated[bool, Flag("--debug", help="Show the traceback of an error.")] = False

    def check(self) -> tuple[str, Path]:
        """Return the file and the folder, once both are known to be as they should.

        Raises:
            UsageError: one is missing; the folder holds files or cannot be made.
        """
        if self.file is None or self.folder is None:
            missing = "file" if self.file is None else "folder"
            raise UsageError(f"no {missing} is given", hint=_USAGE)
        folder = expand(self.folder)
        check_name(folder, "FOLDER")
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"`{folder}` is a file, not a folder")
        if folder.is_dir() and os.listdir(folder):
            raise UsageError(f"folder `{folder}` is not empty", hint="give a new folder")
        parent = folder.absolute().parent
        if not parent.is_dir():
            raise UsageError(f"folder `{parent}` does not exist", hint=f"mkdir -p {parent}")
        if not os.access(parent, os.W_OK):
            raise UsageError(f"folder `{parent}` is not writable")
        find_file(self.file)
        return self.file, folder

    def convert(self, progress: bool) -> Path:
        """Convert the file, and return the folder."""
        file, folder = self.check()
        convert(file, folder, dtype=self.dtype, revision=self.revision, progress=progress)
        return folder
