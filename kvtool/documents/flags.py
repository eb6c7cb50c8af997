"""What flags set in a recipe, each in its place."""

from __future__ import annotations

from typing import Any, get_args

from kvtool.documents.settings import MODEL_SETTINGS, settings_of
from kvtool.errors import UsageError
from kvtool.sizes import parse_count


class Flags:
    """Settings that are laid over a recipe, weakest first.

    Attributes:
        values: each flag as typed, and its value nested as in a recipe.
    """

    def __init__(self) -> None:
        self.values: list[tuple[str, dict[str, Any]]] = []

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

    def take(self, name: str, value: Any, *keys: str) -> None:
        """Set the value of an option under the option's own name in a section."""
        self.set(f"--{name.replace('_', '-')} {value}", value, *keys, name)

    def take_model(self, model: str | None, settings: dict[str, Any]) -> None:
        """Set which model runs, and how.

        Args:
            settings: values of `MODEL_SETTINGS`.
        """
        self.set(f"--model {model}", model, "model", "id")
        for name in MODEL_SETTINGS:
            self.take(name, settings.get(name), "model")

    def sets(self, key: str) -> bool:
        """Tell whether a flag sets a key of a recipe."""
        return any(key in values for _, values in self.values)

    def check_beside_plan(self, plan: str) -> None:
        """Refuse a budget or an allocator beside a plan, which brings both.

        Args:
            plan: where it stands.

        Raises:
            UsageError: the first such flag.
        """
        for flag, values in self.values:
            if values.keys() & {"budget", "allocator"}:
                raise UsageError(
                    f"{flag} and the plan in `{plan}` exclude each other: a plan brings its own "
                    "budgets",
                    hint="leave out one of them, or make another plan with kvtool plan-budget",
                )


def flags_of(settings: Any) -> Flags:
    """Return what settings set in a recipe: every field whose flag has a place there."""
    flags = Flags()
    for each in settings_of(type(settings)):
        key, value = each.flag.key, getattr(settings, each.name)
        if key is None or value is None:
            continue
        if each.flag.is_switch:
            if value:
                flags.set(each.flag.names, each.flag.sets, *key.split("."))
            continue
        if isinstance(value, str) and int in get_args(each.type):
            value = parse_count(value)
        if not isinstance(value, (str, bool, int, float, list)):
            value = str(value)
        flags.set(f"--{each.flag.name.replace('_', '-')} {value}", value, *key.split("."))
    return flags
