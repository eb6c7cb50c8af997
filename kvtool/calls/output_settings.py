"""The settings of every command: where its data goes, and how much is said beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from kvtool.documents.files import check_writable, expand
from kvtool.documents.settings import Flag

Format = Literal["text", "json", "yaml"]
_SUFFIXES: dict[str, Format] = {
    ".json": "json",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".txt": "text",
}


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """Where a command's data goes, in which form, and how much is said beside it."""

    output: Annotated[
        str | None,
        Flag(
            "--output -o",
            metavar="PATH|-",
            help="Write the data here, whole or not at all.",
            python=None,
        ),
    ] = None
    format: Annotated[
        Format | None,
        Flag(
            "--format -f",
            help="Form of the data.  [default: by the suffix of --output]",
            python=None,
        ),
    ] = None
    quiet: Annotated[bool, Flag("--quiet -q", help="Say nothing but errors.", python=None)] = False
    progress: Annotated[
        bool | None,
        Flag(
            "--progress/--no-progress",
            help="Progress bars.  [default: on a terminal]",
            python=None,
        ),
    ] = None
    debug: Annotated[bool, Flag("--debug", help="Show the traceback of an error.", python=None)] = (
        False
    )

    @property
    def output_path(self) -> Path | None:
        """The file to write, or None for stdout."""
        return None if self.output in (None, "-") else expand(self.output)

    def check_output(self) -> None:
        """Refuse an output file that could not be written at the end."""
        if self.output_path is not None:
            check_writable(self.output_path, "--output")

    def choose_format(self, otherwise: Format) -> Format:
        """Return the format asked for by name or by suffix."""
        suffix = self.output_path.suffix.lower() if self.output_path else ""
        return self.format or _SUFFIXES.get(suffix, otherwise)
