"""Values that may be written in a short form or as a mapping."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Discriminator

from kvtool.documents.document import Section
from kvtool.sizes import parse_count

SHORT, MAPPING = "<short>", "<mapping>"
MOST = 500  # policies, budgets, tasks or gates of a recipe


class RecipeSection(Section):
    """A part of a recipe: values are not converted, so that `yes` is no truth and "8" no number.

    Attributes:
        refused_keys: keys that are refused for a reason of their own.
    """

    model_config = ConfigDict(strict=True)

    refused_keys: ClassVar[dict[str, str]] = {}


def _shape(value: Any) -> str:
    return MAPPING if isinstance(value, (dict, BaseModel)) else SHORT


BY_SHAPE = Discriminator(_shape)
"""Tells the members of a union apart that are tagged `SHORT` and `MAPPING`."""


def listed(value: Any) -> Any:
    """Let one value stand for a list of one."""
    return value if isinstance(value, (list, tuple)) or value is None else [value]


def counted(value: Any) -> Any:
    """Read `4K`; anything but text is left for the type to judge."""
    return parse_count(value) if isinstance(value, str) else value
