"""Ctrl-C while an answer is generated: it ends after the running token, and is kept."""

from __future__ import annotations

import signal
import threading
from typing import Any

from kvtool.processes import started


class Interruption:
    """Whether somebody has pressed Ctrl-C, asked before an answer and after each of its tokens.

        with Interruption() as interrupted:
            generate(.., stop_when=interrupted)

    The first question takes over the signal: until then, while the prompt is read, Ctrl-C ends the
    command at once, as it does when pressed again. Processes that share a model leave the signal
    alone: they would stop at different tokens.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._before: Any = None

    def __enter__(self) -> Interruption:
        return self

    def __call__(self) -> bool:
        ours = threading.current_thread() is threading.main_thread() and started().count == 1
        # a shell's background jobs ignore the signal
        if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._press)
        return self.pressed

    def _press(self, *unused: object) -> None:
        self.pressed = True
        self.__exit__()

    def __exit__(self, *unused: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None
