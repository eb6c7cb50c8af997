"""SVG as matplotlib writes it, made a part of an HTML page."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from kvtool.report.style import FRONT, GRID

_THEME = {  # of `kvtool.report.style`, and of `page.css`
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
