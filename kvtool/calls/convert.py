"""The settings of `kvtool convert`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvtool.documents.files import check_writable, expand
from kvtool.documents.settings import Dtype, flag
from kvtool.errors import UsageError
from kvtool.models.load import convert, find_file

_USAGE = "kvtool convert FILE.gguf FOLDER"


@dataclass(frozen=True, kw_only=True)
class ConvertSettings:
    """Which file is converted, where to, and how much is said of it."""

    file: str | None = flag(
        "FILE.gguf|REPO:FILE.gguf", "A GGUF file, or the name of one on the hub."
    )
    folder: str | None = flag("FOLDER", "A folder to make.")
    dtype: Dtype = flag(
        "--dtype=DTYPE",
        "Of the weights: float32, bfloat16 or float16; auto is the file's own, and "
        "bfloat16 where they are packed.",
        default="auto",
    )
    revision: str | None = flag("--revision=REV", "Branch, tag or commit of a file on the hub.")
    quiet: bool = flag("--quiet -q", "Say nothing but errors.", default=False)
    progress: bool | None = flag(
        "--progress/--no-progress", "Progress bars.  [default: on a terminal]"
    )
    debug: bool = flag("--debug", "Show the traceback of an error.", default=False)

    def check(self) -> tuple[str, Path]:
        """Return the file and the folder, once both are known to be as they should.

        Raises:
            UsageError: one is missing; the folder holds files or cannot be made.
        """
        if self.file is None or self.folder is None:
            missing = "file" if self.file is None else "folder"
            raise UsageError(f"no {missing} is given", hint=_USAGE)
        folder = expand(self.folder)
        if folder.exists() and not (folder.is_dir() and not os.listdir(folder)):
            raise UsageError(f"`{folder}` is no empty folder", hint="give a new folder")
        check_writable(folder.absolute() / "config.json" if folder.exists() else folder, "FOLDER")
        find_file(self.file)
        return self.file, folder

    def convert(self, progress: bool) -> Path:
        """Convert the file, and return the folder."""
        file, folder = self.check()
        convert(file, folder, dtype=self.dtype, revision=self.revision, progress=progress)
        return folder
