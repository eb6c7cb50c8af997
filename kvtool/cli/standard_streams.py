"""Put something in the place of standard streams that are closed (`kvtool <&- >&- 2>&-`).

Python has no object for a stream that was closed before it began, and the next file that is opened
gets the stream's number. What a library prints would then be in that file.
"""

from __future__ import annotations

import os
import sys

_REFUSING = ((0, "stdin", os.O_WRONLY), (1, "stdout", os.O_RDONLY))
"""Streams whose data would be lost: reading the one and writing the other stays an error."""


def fill_closed_streams() -> None:
    """Open the null device in place of each closed stream."""
    for number, name, mode in (*_REFUSING, (2, "stderr", os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            if os.open(os.devnull, mode) != number:  # the lowest free number is the closed stream's
                raise
            stream = os.fdopen(number, "r" if number == 0 else "w", closefd=False, encoding="utf-8")
            setattr(sys, name, stream)
