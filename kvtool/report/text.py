"""Show documents as text; the module that lays out a kind is imported once such one is shown."""

from __future__ import annotations

import io
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

if TYPE_CHECKING:
    from kvtool.documents.generation import GenerationDocument

_LAYOUTS = {
    "plan": "kvtool.report.plans:plan_table",
    "profile": "kvtool.report.measurements:profile_table",
    "results": "kvtool.report.results_text:results_tables",
    "generation": "kvtool.report.text:answer",
}


def layout(document: Any) -> RenderableType:
    """Return what rich lays out on a terminal for a document."""
    module, name = _LAYOUTS[document.kind].split(":")
    laid_out: RenderableType = getattr(import_module(module), name)(document)
    return laid_out


def text(document: Any, width: int) -> str:
    """Return what a terminal of a width in letters shows of a document, without colours."""
    return plain_text(layout(document), width)


def plain_text(content: RenderableType, width: int) -> str:
    """Return what a terminal without colours shows, without the spaces that end its lines."""
    written = io.StringIO()
    console = Console(
        file=written, width=width, highlight=False, color_system=None, force_jupyter=False
    )
    console.print(content, crop=False)  # a command stays on its line
    return "".join(f"{line.rstrip()}\n" for line in written.getvalue().splitlines())


def answer(document: GenerationDocument) -> RenderableType:
    """Return an answer, and what it took."""
    return Group(Text(document.text), Text(document.in_words()))
