"""Documents that a Python call is given: as such, as their data, or by their file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtool.documents.files import expand
from kvtool.documents.plan import PlanDocument
from kvtool.documents.recipe import Recipe
from kvtool.documents.source import Source, read_source
from kvtool.documents.tree import Mark, Node
from kvtool.errors import UsageError

_SUFFIXES = (".yaml", ".yml", ".json")


def is_document(path: str | Path) -> bool:
    """Whether a path is that of a document, and not a model's folder or its name."""
    place = expand(path)
    return place.suffix.lower() in _SUFFIXES or place.is_file()


def document_of(given: Any, what: str) -> Source | PlanDocument:
    """Return a recipe, plan or profile for validation; a plan that is validated stays one.

    Args:
        what: is wanted, as an error begins.

    Raises:
        UsageError, DocumentError: a file that cannot be read; neither document, data nor file.
    """
    if isinstance(given, PlanDocument):
        return given
    if isinstance(given, Recipe):
        given = given.to_data()
    if isinstance(given, Mapping):
        name = f"the {given.get('kind', 'recipe')}"
        return Source(name, Node.of(dict(given), Mark(name)))
    if isinstance(given, (str, Path)):
        return read_source(str(given), option=what.removeprefix("a "))
    raise UsageError(f"{what} is a document, its data or its file, got {type(given).__name__}")
