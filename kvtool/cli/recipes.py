"""Recipes and flags put together: built-in < recipe < flags < `--set`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtool.cli.options import RecipeOptions

if TYPE_CHECKING:
    from kvtool.documents.recipe import Recipe
    from kvtool.documents.source import Source

_MODEL = ("revision", "dtype", "device", "device_map", "attn_implementation")


class Flags:
    """What flags set, each in the place that it has in a recipe."""

    def __init__(self, options: RecipeOptions) -> None:
        self.values: list[tuple[str, dict[str, Any]]] = []
        self.set(f"--model {options.model}", options.model, "model", "id")
        for name in _MODEL:
            self.take(options, name, "model")
        self.take(options, "seed")

    def set(self, flag: str, value: Any, *keys: str) -> None:
        """Set a value, unless it is None or an empty list.

        Args:
            flag: as typed, for errors.
            keys: the way to it in a recipe.
        """
        if value is None or value == []:
            return
        for key in reversed(keys):
            value = {key: value}
        self.values.append((flag, value))

    def take(self, options: RecipeOptions, name: str, *keys: str) -> None:
        """Set what an option holds under its own name in a section."""
        value = getattr(options, name)
        self.set(f"--{name.replace('_', '-')} {value}", value, *keys, name)


def resolve(options: RecipeOptions, flags: Flags, command: str) -> tuple[Recipe, Source]:
    """Return the recipe that the options mean, and where each part of it stands.

    Args:
        command: as typed, such as `kvtool eval`.

    Raises:
        DocumentError: every mistake, with its place or its flag.
        UsageError: the recipe cannot be read.
    """
    from kvtool.documents.recipe_source import read_recipe
    from kvtool.documents.source import Source, check_kind, read_source

    if options.recipe is None:
        source = Source.empty()
    else:
        source = read_source(options.recipe, option="recipe")
        check_kind(source, takes=("recipe",), command=command)
    return read_recipe(source, flags.values, options.set, options.unset)
