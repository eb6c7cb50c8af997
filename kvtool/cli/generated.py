"""What `generate` has generated: as it comes, and at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvtool.calls.base_settings import OutputSettings
from kvtool.calls.listener import Listener
from kvtool.cli.interruption import Interruption
from kvtool.cli.output import render, write_data
from kvtool.cli.terminal import Terminal, tell

if TYPE_CHECKING:
    from kvtool.documents.generation import GenerationDocument


def text_on_stdout(options: OutputSettings) -> bool:
    """Tell whether the data on stdout is the text itself."""
    return options.choose_format("text") == "text" and options.output_path is None


def listen(
    options: OutputSettings, stream: bool | None, terminal: Terminal, interrupted: Interruption
) -> Listener:
    """Return what prints answers.

    Args:
        stream: whether as they come; None: to a person who reads stdout.
        interrupted: ends them.
    """
    piece = _choose_stream(options, stream, terminal)

    def print_rest(answer: str) -> None:
        if piece is not None:
            piece("\n")
        elif text_on_stdout(options):
            terminal.write(f"{answer}\n")

    return Listener(piece, print_rest, interrupted)


def show(
    document: GenerationDocument,
    options: OutputSettings,
    terminal: Terminal,
    interrupted: Interruption,
) -> None:
    """Write the document, if the text is not the data, and say what was held."""
    if not text_on_stdout(options):
        text = render(document, options.choose_format("text"), f"{document.text}\n")
        write_data(text, options, terminal)
    terminal.note(f"{'interrupted: ' if interrupted.pressed else ''}{document.in_words()}")


def _choose_stream(
    options: OutputSettings, wanted: bool | None, terminal: Terminal
) -> Callable[[str], Any] | None:
    """Return what takes the text as it comes: stdout if text is the data there, else stderr."""
    if text_on_stdout(options) and (terminal.interactive if wanted is None else wanted):
        return terminal.write
    if wanted and not options.quiet:
        return tell
    return None
