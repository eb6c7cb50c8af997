"""Files and modules that a README names exist."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(
        page for part in ("kvtool", "recipes", "tests") for page in (ROOT / part).rglob("*.md")
    ),
]
# What readers of "Add a policy" write:
OURS = {"peak.py", "test_peak.py", "my_peak.py", "my_scores.py", "losses.py", "test_losses.py"}
FILE = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.pyi?|(?:[\w.-]+/)+)`")
MODULE = re.compile(r"\b(?:kvtool|tests)(?:\.[A-Za-z_]\w*)+")
BESIDE = {"plots/", "parts/"}  # folders of a run


def unknown_files(text: str, folder: Path) -> list[str]:
    """Return the files and folders in backticks that are neither in the repository nor beside.

    A path begins at the root, at the package or at the folder of the page. A name alone may be that
    of any file or folder below the page's.
    """
    found = []
    for name in FILE.findall(text):
        places = [base / name for base in (ROOT, ROOT / "kvtool", folder)]
        alone = "/" not in name.rstrip("/") and any(folder.rglob(name.rstrip("/")))
        known = alone or any(place.exists() for place in places)
        if not known and Path(name).name not in OURS and name not in BESIDE and "NAME" not in name:
            found.append(name)
    return found


def unknown_modules(text: str) -> list[str]:
    """Return the dotted names of modules, functions and classes that cannot be imported."""
    return [name for name in dict.fromkeys(MODULE.findall(text)) if not is_known(name)]


def is_known(name: str) -> bool:
    try:
        if find_spec(name) is not None:  # without running it
            return True
    except ModuleNotFoundError:
        pass
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_what_the_pages_name_exists():
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found[str(page.relative_to(ROOT))] = unknown_files(text, page.parent) + unknown_modules(
            text
        )
    assert {page: names for page, names in found.items() if names} == {}


def test_the_page_of_the_package_lists_every_package():
    table = (ROOT / "kvtool" / "README.md").read_text(encoding="utf-8").split("## A step")[0]
    listed = {name.rstrip("/") for name in re.findall(r"`(\w+/?)`", table)}
    here = {each.stem for each in (ROOT / "kvtool").iterdir() if not each.stem.startswith("_")}
    assert {name for name in here if name not in ("README", "py")} <= listed
