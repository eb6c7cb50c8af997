"""The settings of every command: where its data goes, and how much is said beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvtool.documents.files import check_writable, expand
from kvtool.documents.settings import flag
from kvtool.errors import UsageError
from kvtool.extras import require

Format = Literal["text", "json", "yaml"]
_SUFFIXES: dict[str, Format] = {
    ".json": "json",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".txt": "text",
}

PICTURES = (".png", ".svg", ".pdf")


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

    def outputs(self) -> dict[str, Path | None]:
        """Return the files to write, by their options."""
        return {"--output": self.output_path}

    def check_output(self) -> None:
        """Refuse files that could not be written at the end, and two that are the same."""
        seen: dict[Path, str] = {}
        for option, path in self.outputs().items():
            if path is None:
                continue
            if path in seen:
                raise UsageError(f"{seen[path]} and {option} both write `{path}`")
            seen[path] = option
            check_writable(path, option)
            if option == "--plot":
                if path.suffix.lower() not in PICTURES:
                    raise UsageError(f"--plot must end in {', '.join(PICTURES)}, got `{path}`")
                require("plots", needed_by="--plot")

    def choose_format(self, otherwise: Format) -> Format:
        """Return the format asked for by name or by suffix."""
        suffix = self.output_path.suffix.lower() if self.output_path else ""
        return self.format or _SUFFIXES.get(suffix, otherwise)
