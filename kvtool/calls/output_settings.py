"""The settings of every command: where its data goes, and how much is said beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvtool.documents.files import check_writable, expand
from kvtool.documents.settings import flag

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

    output: str | None = flag(
        "--output -o=PATH|-", "Write the data here, whole or not at all.", python=None
    )
    format: Format | None = flag(
        "--format -f", "Form of the data.  [default: by the suffix of --output]", python=None
    )
    quiet: bool = flag("--quiet -q", "Say nothing but errors.", python=None, default=False)
    progress: bool | None = flag(
        "--progress/--no-progress", "Progress bars.  [default: on a terminal]", python=None
    )
    debug: bool = flag("--debug", "Show the traceback of an error.", python=None, default=False)

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
