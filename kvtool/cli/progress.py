"""How far a long piece of work is, on stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from kvtool.cli.control_characters import visible
from kvtool.cli.terminal import Terminal


@contextlib.contextmanager
def show_progress(terminal: Terminal, total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar with the time left; call what is given once for every step, with what it was.

    Nothing is shown where nothing is left to do.
    """
    if not terminal.progress or total == 0:
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        yield lambda text: progress.update(task, advance=1, description=visible(text))
