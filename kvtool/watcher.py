"""Who is told how a long piece of work goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtool.documents.results import ResultsDocument


class Watcher:
    """Is told what happens, and says nothing of it; subclasses show it.

    Attributes:
        shows_progress: whether progress is worth telling.
        listens: whether it is worth finding out what would only be told.
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
        """Take the results of a run once they are written, while nobody else writes there."""
