"""A results document as one HTML file, to read, send and print.

The file needs no other: no script, no style sheet, font or picture from elsewhere. Without
matplotlib it has the tables only, and says how to get the pictures.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from markupsafe import Markup, escape

from kvtool.documents.files import write_text
from kvtool.documents.results import ResultsDocument
from kvtool.extras import installed
from kvtool.report import results as tables
from kvtool.report import words
from kvtool.report.panels import FRONT, GRID, drawing, svg
from kvtool.report.pictures import pictures
from kvtool.report.templates import html_table, template
from kvtool.report.variants import labelled, labels, results_of, task_names

if TYPE_CHECKING:
    from kvtool.evaluation.run.wrong import WrongAnswer

_THEME = {  # of `kvtool.report.panels`, and of `page.css`
    "#000000": "currentColor",
    "#ffffff": "var(--paper)",
    GRID: "var(--line)",
    FRONT: "var(--front)",
}


def inline_svg(document: str, prefix: str, label: str) -> Markup:
    """Return an SVG document as part of a page, its ids made unique by `prefix`.

    Prologue, namespaces and the style sheet, which would leak into the page, are left out: a page
    needs none of them. Black, white and greys become the page's, light or dark; other colours stay.
    """
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg.replace("xlink:href", "href"))
    for colour, variable in _THEME.items():
        svg = re.sub(rf"\b(fill|stroke): {colour}", rf"\1: {variable}", svg)
    view = re.findall(r'viewBox="[\d. ]+"', svg)[0]
    width = re.findall(r'width="([\d.]+)pt"', svg)[0]
    body = svg[svg.index(">") + 1 :].rstrip()
    return Markup(f'<svg {view} width="{width}pt" role="img" aria-label="{escape(label)}">{body}')


WrongByTask: TypeAlias = "Mapping[str, Sequence[WrongAnswer]]"


def write_page(document: ResultsDocument, path: Path, wrong: WrongByTask | None = None) -> None:
    """Write the page, whole or not at all.

    Args:
        wrong: answers of each task to show beside their references.

    Raises:
        KvtoolError: the file cannot be written.
    """
    write_text(path, page(document, wrong))


def page(document: ResultsDocument, wrong: WrongByTask | None = None) -> str:
    """Return the page as text."""
    named = labels(document)
    document = labelled(document)
    answers = {
        task: [replace(each, variant=named.get(each.variant, each.variant)) for each in found]
        for task, found in (wrong or {}).items()
        if found
    }
    return template("page.html").render(
        document=document,
        tasks={task: results_of(document, task)[0] for task in task_names(document)},
        wrong=answers,
        tables=tables,
        words=words,
        table=html_table,
        drawn=installed("plots"),
        pictures=_pictures(document),
        command=shlex.join(document.argv),
        took=_took(document),
    )


def _took(document: ResultsDocument) -> str:
    try:
        start, end = (datetime.fromisoformat(t) for t in (document.started, document.finished))
        return f" ({(end - start).total_seconds() / 60:.1f} minutes)"
    except (ValueError, TypeError):  # one has a time zone, the other none
        return ""


def _pictures(document: ResultsDocument) -> dict[str | None, list[tuple[str, Markup]]]:
    """Return titles and pictures as inline SVG, by the task that they belong to."""
    found: dict[str | None, list[tuple[str, Markup]]] = defaultdict(list)
    if not installed("plots"):
        return found
    with drawing():
        for rank, picture in enumerate(pictures(document)):
            drawn = inline_svg(svg(picture.draw()), f"p{rank}", picture.title)
            found[picture.task].append((picture.title, drawn))
    return found
