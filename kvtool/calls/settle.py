"""Recipe, plan and settings of `generate` and `compress` put together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvtool.calls.prompt import check_stdin
from kvtool.calls.settings import PromptSettings
from kvtool.documents.flags import MODEL_SETTINGS, Flags
from kvtool.errors import UsageError
from kvtool.policies.imported import check_imported
from kvtool.sizes import parse_count

if TYPE_CHECKING:
    from kvtool.documents.plan import PlanDocument
    from kvtool.documents.recipe import Recipe

_DRAWING = ("max_new_tokens", "temperature", "stop")  # settings of generate alone

Prompted = TypeVar("Prompted", bound="PromptSettings")


def settle(settings: Prompted, command: str) -> tuple[Prompted, PlanDocument | None]:
    """Fill in what no flag says: from the recipe or plan, else from the defaults of recipes.

    Args:
        command: as typed, such as `kvtool generate`.

    Returns:
        The settings, and the plan that takes the place of a budget, if there is one.

    Raises:
        UsageError: the recipe cannot be read, or means more than one policy or budget.
    """
    from kvtool.documents.recipe import Recipe

    check_stdin(settings)
    if settings.recipe is None and not settings.set and not settings.unset:
        values = _values(Recipe(), settings)
        given = {name: getattr(settings, name) for name in values}
        _check_allocator(settings)
        filled = {k: values[k] if v in (None, []) else v for k, v in given.items()}
        return replace(settings, **filled), None
    from kvtool.documents.resolve import resolve
    from kvtool.documents.source import read_source

    policy = settings.policy
    flags = Flags()
    flags.take_model(settings.model, {name: getattr(settings, name) for name in MODEL_SETTINGS})
    flags.take("seed", settings.seed)
    flags.take("allocator", settings.allocator)
    flags.take("policy", None if policy is None else str(policy))
    for name in ("budget", "prefill"):
        flags.take(name, getattr(settings, name))
    for name in _DRAWING:
        value = getattr(settings, name, None)
        if isinstance(value, str):
            value = parse_count(value)
        flags.set(f"--{name.replace('_', '-')} {value}", value, "generation", name)
    recipe = settings.recipe
    resolved = resolve(
        read_source(recipe, option="recipe or plan") if isinstance(recipe, str) else recipe,
        flags,
        sets=settings.set,
        unsets=settings.unset,
        command=command,
        check_named=check_imported,
    )
    settings = replace(settings, **_values(resolved.recipe, settings))
    if policy is not None and not isinstance(policy, str):
        settings = replace(settings, policy=policy)  # which strings may not spell
    _check_allocator(settings)
    if resolved.plan is not None and settings.policy is None:
        raise UsageError("the plan names no policy", hint="--policy h2o")
    return settings, resolved.plan


def _values(recipe: Recipe, settings: PromptSettings) -> dict[str, Any]:
    """Return the settings that a recipe sets."""
    model, drawn = recipe.model, recipe.generation
    tokens = None if drawn.max_new_tokens is None else str(drawn.max_new_tokens)
    values = {
        "model": model.id,
        **model.model_dump(exclude={"id"}),
        "policy": _only(recipe.policies(), "policies", "--policy"),
        "allocator": recipe.allocator,
        "budget": _only([str(budget) for budget in recipe.budgets()], "budgets", "--budget"),
        "prefill": recipe.prefill,
        "seed": recipe.seed,
    }
    drawing = dict(zip(_DRAWING, (tokens, drawn.temperature, drawn.stop), strict=True))
    return values | {name: value for name, value in drawing.items() if hasattr(settings, name)}


def _check_allocator(settings: PromptSettings) -> None:
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
