"""Tables on a terminal, whose own colours it obeys and whose contents it does not; or as text."""

from __future__ import annotations

import io
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

from kvtool.errors import visible
from kvtool.sizes import WIDTH


@dataclass(frozen=True)
class Visible:
    """Something that rich can print, with the control characters in it spelled out."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.content, options):
            text = segment.text if segment.control else visible(segment.text)
            yield Segment(text, segment.style, segment.control)


def as_text(content: RenderableType, width: int = WIDTH) -> str:
    """Return what a terminal without colours shows, without the spaces that end its lines."""
    written = io.StringIO()
    Console(file=written, width=width, highlight=False, color_system=None).print(content)
    return "".join(f"{line.rstrip()}\n" for line in written.getvalue().splitlines())
