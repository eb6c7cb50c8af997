"""The interface through which a long piece of work reports its progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtool.documents.results import ResultsDocument


class Watcher:
    """Receives the notes, progress and results of a command and drops them; subclasses show them.

    Attributes:
        shows_progress: whether `progress` shows anything.
        listens: whether notes are shown, so that work done only for a note is worth it.
    """

    shows_progress = False
    listens = False

    def note(self, text: str) -> None:
        """Take a line that a person should read."""

    def note_any(self, text: str | None) -> None:
        """Take a line, if there is one."""
        if text is not None:
            self.note(text)

    def progress(self, total: int) -> AbstractContextManager[Callable[[str], None]]:
        """Return a context with what is called after each of `total` steps, with what it was."""
        return nullcontext(lambda text: None)

    def show_kept(self, texts: Sequence[Any]) -> None:
        """Take kept texts (`kvtool.report.kept.text`) that are to be read on a terminal."""

    def show_results(self, results: ResultsDocument, folder: Path) -> None:
        """Take the results of a run once they are written, while no other process writes there."""
