"""Write the README as a package index shows it; everything else is in pyproject.toml.

An index has no files beside the page: links into the repository become absolute, `<picture>`
becomes an image. The address is `Source` under `[project.urls]` in pyproject.toml. Without one,
such links become plain text and the picture is left out.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
_FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_PICTURE = re.compile(r"<picture>.*?</picture>\n*", re.DOTALL)
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)([^)\s]+)\)")


def source_address(project: str) -> str | None:
    """Return the address of the repository that pyproject.toml names, None where it names none."""
    urls = re.search(r"^\[project\.urls\]\n((?:(?!\[).*\n?)*)", project, re.MULTILINE)
    found = urls and re.search(r'^Source = "([^"]+?)/?"', urls[1], re.MULTILINE)
    return found[1] if found else None


def for_index(text: str, source: str | None, version: str) -> str:
    """Return a page without relative links and HTML.

    Args:
        source: address of the repository on GitHub.
        version: whose tag the links lead to; a development version leads to the newest state.
    """
    tag = "HEAD" if "dev" in version else f"v{version}"

    def picture(found: re.Match[str]) -> str:
        alt, place = (
            re.search(rf'<img[^>]* {name}="([^"]*)"', found[0]) for name in ("alt", "src")
        )
        if source is None or alt is None or place is None:
            return ""
        return f"![{alt[1]}]({source}/raw/{tag}/{place[1]})\n\n"

    def link(found: re.Match[str]) -> str:
        if source is None:
            return found[1]
        target = f"README.md{found[2]}" if found[2].startswith("#") else found[2]
        return f"[{found[1]}]({source}/blob/{tag}/{target})"

    parts = _FENCED.split(text)
    for i in range(0, len(parts), 2):
        parts[i] = _LINK.sub(link, _PICTURE.sub(picture, parts[i]))
    return "".join(parts)


def index_page(root: Path = ROOT) -> str:
    """Return the README of a clone as an index shows it."""
    version = re.search(r'^VERSION = "(.+)"', (root / "kvtool" / "version.py").read_text(), re.M)
    assert version is not None, "kvtool/version.py declares VERSION"
    address = source_address((root / "pyproject.toml").read_text(encoding="utf-8"))
    return for_index((root / "README.md").read_text(encoding="utf-8"), address, version[1])


if __name__ == "__main__":
    setup(long_description=index_page(), long_description_content_type="text/markdown")
