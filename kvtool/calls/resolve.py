"""Resolve the settings of `generate` and `compress`: flags over recipe and plan, then defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvtool.calls.settings import CachedSettings
from kvtool.documents.recipe import Recipe
from kvtool.documents.resolve import flags_of, resolve
from kvtool.documents.settings import settings_of
from kvtool.documents.source import read_source
from kvtool.errors import UsageError
from kvtool.policies.grammar import check_imported

if TYPE_CHECKING:
    from kvtool.documents.plan import PlanDocument

Prompted = TypeVar("Prompted", bound="CachedSettings")


def resolve_settings(settings: Prompted, command: str) -> tuple[Prompted, PlanDocument | None]:
    """Fill in what no flag says: from the recipe or plan, else from the defaults of recipes.

    Args:
        command: as typed, such as `kvtool generate`.

    Returns:
        The settings, and the plan that takes the place of a budget, if there is one.

    Raises:
        UsageError: settings that do not go together; the recipe cannot be read, or means more than
            one policy or budget.
    """
    _check_stdin(settings)
    if settings.recipe is None and not settings.set and not settings.unset:
        settings.check()
        values = _values(Recipe(), settings)
        unset = {k: v for k, v in values.items() if getattr(settings, k) in (None, [])}
        _check_allocator(settings)
        return replace(settings, **unset), None
    policy, recipe = settings.policy, settings.recipe
    resolved = resolve(
        read_source(recipe, option="recipe or plan") if isinstance(recipe, str) else recipe,
        flags_of(settings),
        sets=settings.set,
        unsets=settings.unset,
        command=command,
        check_named=check_imported,
    )
    settings = replace(settings, **_values(resolved.recipe, settings))
    if policy is not None and not isinstance(policy, str):
        settings = replace(settings, policy=policy)  # which strings may not spell
    _check_allocator(settings)
    settings.check()
    if resolved.plan is not None and settings.policy is None:
        raise UsageError("the plan names no policy", hint="--policy h2o")
    return settings, resolved.plan


def _check_stdin(settings: CachedSettings) -> None:
    """Refuse to read stdin for two things."""
    files: dict[str, object] = {"the recipe": settings.recipe}
    files["--prompt-file"] = getattr(settings, "prompt_file", None)
    files["--turns"] = getattr(settings, "turns", None)
    files["--prompts"] = getattr(settings, "prompts", None)
    readers = [name for name, path in files.items() if path == "-"]
    if len(readers) > 1:
        raise UsageError(f"{' and '.join(readers)} both read stdin; name a file for one of them")


def _values(recipe: Recipe, settings: CachedSettings) -> dict[str, Any]:
    """Return the settings that a recipe sets, each from its place there."""
    only = {
        "policy": _only(recipe.policies(), "policies", "--policy"),
        "budget": _only([str(budget) for budget in recipe.budgets()], "budgets", "--budget"),
    }
    return {
        each.name: only[each.flag.key] if each.flag.key in only else recipe.at(each.flag.key)
        for each in settings_of(type(settings))
        if each.flag.key is not None
    }


def _check_allocator(settings: CachedSettings) -> None:
    allocator = settings.allocator
    if allocator is not None and settings.policy is None:
        raise UsageError("--allocator needs a policy", hint=f"--policy h2o --allocator {allocator}")


def _only(values: list[str], what: str, flag: str) -> str | None:
    if len(values) > 1:
        raise UsageError(
            f"the recipe has {len(values)} {what}: {', '.join(values)}",
            hint=f"choose one, {flag} {values[0]}",
        )
    return values[0] if values else None
