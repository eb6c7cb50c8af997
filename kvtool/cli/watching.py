"""Long pieces of work shown on the terminal while they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from kvtool.cli.kept import print_kept
from kvtool.cli.progress import show_progress
from kvtool.cli.terminal import Terminal
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.report.kept.text import KeptText


class TerminalWatcher(Watcher):
    """Shows notes and progress on stderr.

    Attributes:
        terminal: where.
    """

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.shows_progress = terminal.progress
        self.listens = not terminal.quiet

    def note(self, text: str) -> None:
        """Tell the person at the terminal."""
        self.terminal.note(text)

    def show_kept(self, texts: Sequence[KeptText]) -> None:
        """Print kept texts."""
        print_kept(texts)

    def progress(self, total: int) -> AbstractContextManager[Callable[[str], None]]:
        """Show a bar with the time left."""
        return show_progress(self.terminal, total)
