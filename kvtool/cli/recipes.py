"""Recipes that options name, and what model options set in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.cli.options import RecipeOptions

if TYPE_CHECKING:
    from kvtool.documents.flags import Flags
    from kvtool.documents.source import Source


def model_flags(options: RecipeOptions) -> Flags:
    """Return what every command with a recipe sets in it: model, seed and allocator."""
    from kvtool.documents.flags import MODEL_SETTINGS, Flags

    flags = Flags()
    flags.take_model(options.model, {name: getattr(options, name) for name in MODEL_SETTINGS})
    flags.take("seed", options.seed)
    flags.take("allocator", options.allocator)
    return flags


def read_given(options: RecipeOptions) -> Source | None:
    """Read the recipe or plan that is named, None if there is none.

    Raises:
        DocumentError, UsageError: it cannot be read.
    """
    from kvtool.documents.source import read_source

    return None if options.recipe is None else read_source(options.recipe, option="recipe or plan")
