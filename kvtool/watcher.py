"""Listeners to a long piece of work: a watcher hears its progress, a listener the text of answers.

A listener may end an answer while it is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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

    def progress(self, total: int) -> AbstractContextManager[Callable[..., None]]:
        """Return a context with what is called after each of `total` steps, with what it was.

        A second value says how many steps were done.
        """
        return nullcontext(lambda text, steps=1: None)

    def show_kept(self, texts: Sequence[Any]) -> None:
        """Take kept texts (`kvtool.report.kept.text`) that are to be read on a terminal."""

    def show_results(self, results: ResultsDocument, folder: Path) -> None:
        """Take the results of a run once they are written, while no other process writes there."""


@dataclass(frozen=True)
class Listener:
    """What is called while answers are generated.

    Attributes:
        on_text: takes pieces of text as they come; None: no caller does.
        on_answer: takes every answer when it is whole.
        stop_when: asked after every token whether to end there; None: never.
    """

    on_text: Callable[[str], object] | None = None
    on_answer: Callable[[str], object] = lambda text: None
    stop_when: Callable[[], bool] | None = None

    def hears(self) -> dict[str, Any]:
        """Return the listener as arguments of `kvtool.generation.generate`."""
        return {"on_text": self.on_text, "stop_when": self.stop_when}

    @property
    def has_enough(self) -> bool:
        """Whether nothing more is to be generated."""
        return self.stop_when is not None and self.stop_when()
