"""HTML and inline SVG from Python values; text is escaped unless it is markup already."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import TypeAlias

Child: TypeAlias = "str | Iterable[Child]"
_VOID = {"meta", "br", "hr"}


class Markup(str):
    """Text that is HTML; any other string is escaped when it becomes a part of a page."""

    __slots__ = ()


def element(name: str, /, *children: Child, **attributes: str) -> Markup:
    """Return an element; a trailing underscore in an attribute's name is dropped (`class_`).

    >>> element("p", "1 < 2 ", element("b", "yes"), class_="note")
    '<p class="note">1 &lt; 2 <b>yes</b></p>'
    """
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for key, value in attributes.items()
    )
    if name in _VOID:
        return Markup(f"<{name}{told}>")
    return Markup(f"<{name}{told}>{''.join(_inside(child) for child in children)}</{name}>")


def _inside(child: Child) -> str:
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return html.escape(child, quote=False)
    return "".join(_inside(part) for part in child)


def inline_svg(document: str, prefix: str, label: str) -> Markup:
    """Return an SVG document as part of a page, its ids made unique by `prefix`.

    Prologue, namespaces and the style sheet, which would leak into the page, are left out: a page
    needs none of them.
    """
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg.replace("xlink:href", "href"))
    view = re.findall(r'viewBox="[\d. ]+"', svg)[0]
    width = re.findall(r'width="([\d.]+)pt"', svg)[0]
    body = svg[svg.index(">") + 1 :].rstrip()
    return Markup(
        f'<svg {view} width="{width}pt" role="img" aria-label="{html.escape(label)}">{body}'
    )
