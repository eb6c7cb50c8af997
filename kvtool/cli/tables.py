"""Tables on a terminal, whose own colours it obeys and whose contents it does not."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

from kvtool.cli.control_characters import visible


@dataclass(frozen=True)
class Visible:
    """Something that rich can print, with the control characters in it spelled out."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.content, options):
            text = segment.text if segment.control else visible(segment.text)
            yield Segment(text, segment.style, segment.control)
