"""Tables on a terminal, whose own colours it obeys and whose contents it does not; or as text."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

from kvtool.errors import visible


@dataclass(frozen=True)
class Trimmed:
    """Something that rich can print, without the blanks that end its lines."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in Segment.split_lines(console.render(self.content, options)):
            while line and not line[-1].text.strip(" "):
                line.pop()
            for place, segment in enumerate(line, start=1):
                text = segment.text.rstrip(" ") if place == len(line) else segment.text
                yield Segment(self.spell(segment, text), segment.style, segment.control)
            yield Segment.line()

    def spell(self, segment: Segment, text: str) -> str:
        """Return the text of a segment as it is printed."""
        return text


class Visible(Trimmed):
    """The same, with the control characters in it spelled out."""

    def spell(self, segment: Segment, text: str) -> str:
        """Return the text of a segment as it is printed."""
        return text if segment.control else visible(text)
