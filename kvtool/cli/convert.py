"""`kvtool convert`: make a plain folder of a GGUF file, for starts that take a second."""

from __future__ import annotations

from kvtool.calls.convert import ConvertSettings
from kvtool.cli.terminal import Terminal
from kvtool.processes import check_alone


def convert(options: ConvertSettings, terminal: Terminal) -> None:
    """Convert a GGUF file to a folder with safetensors, which every command reads as -m FOLDER."""
    check_alone("convert")
    options.check()
    terminal.note(f"reading {options.file} (20 seconds for 135 M parameters)")
    folder = options.convert(terminal.progress)
    terminal.note(f"wrote {folder}; kvtool generate -m {folder} reads it")
