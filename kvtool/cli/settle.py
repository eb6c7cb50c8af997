"""Recipe, plan and flags of `generate` and `compress` put together into one set of options."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvtool.cli.prompt import check_stdin
from kvtool.cli.prompt_options import PromptOptions
from kvtool.cli.recipes import model_flags, read_given
from kvtool.errors import UsageError
from kvtool.policies.imported import check_imported
from kvtool.sizes import parse_count

if TYPE_CHECKING:
    from kvtool.documents.plan import PlanDocument
    from kvtool.documents.recipe import Recipe

_DRAWING = ("max_new_tokens", "temperature", "stop")  # options of generate alone

Prompted = TypeVar("Prompted", bound="PromptOptions")


def settle(options: Prompted, command: str) -> tuple[Prompted, PlanDocument | None]:
    """Fill in what no flag says: from the recipe or plan, else from the defaults of recipes.

    Args:
        command: as typed, such as `kvtool generate`.

    Returns:
        The options, and the plan that takes the place of a budget, if there is one.

    Raises:
        UsageError: the recipe cannot be read, or means more than one policy or budget.
    """
    from kvtool.documents.recipe import Recipe

    check_stdin(options)
    if options.recipe is None and not options.set and not options.unset:
        values = _values(Recipe(), options)
        given = {name: getattr(options, name) for name in values}
        _check_allocator(options.policy, options.allocator)
        filled = {k: values[k] if v in (None, []) else v for k, v in given.items()}
        return replace(options, **filled), None
    from kvtool.documents.resolve import resolve

    flags = model_flags(options)
    for name in ("policy", "budget", "prefill"):
        flags.take(name, getattr(options, name))
    for name in _DRAWING:
        value = getattr(options, name, None)
        if isinstance(value, str):
            value = parse_count(value)
        flags.set(f"--{name.replace('_', '-')} {value}", value, "generation", name)
    resolved = resolve(
        read_given(options),
        flags,
        sets=options.set,
        unsets=options.unset,
        command=command,
        check_named=check_imported,
    )
    options = replace(options, **_values(resolved.recipe, options))
    _check_allocator(options.policy, options.allocator)
    if resolved.plan is not None and options.policy is None:
        raise UsageError("the plan names no policy", hint="--policy h2o")
    return options, resolved.plan


def _values(recipe: Recipe, options: PromptOptions) -> dict[str, Any]:
    """Return the options that a recipe sets."""
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
    return values | {name: value for name, value in drawing.items() if hasattr(options, name)}


def _check_allocator(policy: str | None, allocator: str | None) -> None:
    if allocator is not None and policy is None:
        raise UsageError("--allocator needs a policy", hint=f"--policy h2o --allocator {allocator}")


def _only(values: list[str], what: str, flag: str) -> str | None:
    if len(values) > 1:
        raise UsageError(
            f"the recipe has {len(values)} {what}: {', '.join(values)}",
            hint=f"choose one, {flag} {values[0]}",
        )
    return values[0] if values else None
