"""Recipes and flags put together: built-in < recipe < flags < `--set`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.cli.options import RecipeOptions
from kvtool.errors import UsageError

if TYPE_CHECKING:
    from kvtool.documents.recipe import Recipe
    from kvtool.documents.recipe_source import Check
    from kvtool.documents.source import Source

_LOCK = "recipe.lock.yaml"  # of a run's folder
_MODEL = ("revision", "dtype", "device", "device_map", "tensor_parallel", "attn_implementation")


class Flags:
    """What flags set, each in the place that it has in a recipe."""

    def __init__(self, options: RecipeOptions) -> None:
        self.values: list[tuple[str, dict[str, Any]]] = []
        self.set(f"--model {options.model}", options.model, "model", "id")
        for name in _MODEL:
            self.take(options, name, "model")
        self.take(options, "seed")
        self.take(options, "allocator")

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

    def take(self, options: RecipeOptions, name: str, *keys: str) -> None:
        """Set what an option holds under its own name in a section."""
        value = getattr(options, name)
        self.set(f"--{name.replace('_', '-')} {value}", value, *keys, name)


def resolve(
    options: RecipeOptions, flags: Flags, command: str, check: Check | None = None
) -> tuple[Recipe, Source]:
    """Return the recipe that the options mean, and where each part of it stands.

    Args:
        command: as typed, such as `kvtool eval`.
        check: finds further mistakes, as for `read_recipe`.

    Raises:
        DocumentError: every mistake, with its place or its flag.
        UsageError: the recipe cannot be read.
    """
    from kvtool.documents.recipe_source import read_recipe
    from kvtool.documents.source import Source, check_kind, read_source

    given = flags.values
    own = flags.sets("policy") or any(text.startswith("policy") for text in options.set)
    source = Source.empty()
    if options.recipe is not None:
        source = read_source(options.recipe, option="recipe or plan")
        check_kind(source, takes=("recipe", "plan"), command=command)
        if source.kind == "plan":
            flags.check_beside_plan(source.name)
            values = _values_of_plan(source)
            if not own:
                _check_imported([values.get("policy")], source.name)
            given = [(source.name, values), *given]
            source = Source.empty()
        elif _names_plan(source):
            flags.check_beside_plan(f"{source.name}: budget.plan")
    if source.path is not None and source.path.name == _LOCK and not own:
        node = source.node.child("policy")
        chosen = None if node is None else node.data
        _check_imported(chosen if isinstance(chosen, list) else [chosen], source.name)
    recipe, found = read_recipe(source, given, options.set, options.unset, check)
    if recipe.plan is not None and recipe.allocator is not None:
        raise UsageError(
            f"allocator `{recipe.allocator}` and a plan exclude each other: the plan has split its "
            "budget already",
            hint="leave out one of them",
        )
    return _with_plan(recipe, source), found


def _check_imported(choices: list[Any], where: str) -> None:
    """Refuse scores from outside the package that a run or a plan names and nobody has imported.

    Args:
        choices: policies as they stand there, strings or mappings.
        where: they stand, for the error.

    Raises:
        UsageError: the first such score.
    """
    from kvtool.policies.outside import module_of

    for choice in choices:
        name = choice.get("name") if isinstance(choice, dict) else choice
        module = module_of(name) if isinstance(name, str) else None
        if module is not None and module not in sys.modules:
            raise UsageError(
                f"`{where}` names policy `{name}`, and what a run or a plan names is not imported",
                hint=f"--policy '{name}' imports it",
            )


def _names_plan(source: Source) -> bool:
    """Whether a recipe, or one that it includes, gives its budget by a plan."""
    from kvtool.documents.recipe_source import resolve_includes

    budget = resolve_includes(source).node.child("budget")
    plan = None if budget is None else budget.child("plan")
    return plan is not None and plan.value is not None


def _values_of_plan(source: Source) -> dict[str, Any]:
    """Return what a plan says, in the form of a recipe.

    Raises:
        DocumentError: every mistake in the plan, with its place.
    """
    from kvtool.documents.plan import PlanDocument

    plan = source.validate(PlanDocument)
    values: dict[str, Any] = {
        "model": {"id": plan.model.id, "revision": plan.model.revision},
        "budget": {"plan": plan.to_data()},
    }
    return values if plan.policy is None else values | {"policy": plan.policy}


def _with_plan(recipe: Recipe, source: Source) -> Recipe:
    """Read the plan that a recipe names, relative to the recipe's file, into the recipe."""
    from kvtool.documents.budget_choice import BudgetMapping
    from kvtool.documents.plan import PlanDocument
    from kvtool.documents.source import Source, check_kind, read_named

    if recipe.plan is None:
        return recipe
    if isinstance(recipe.plan, str):
        folder = Path() if source.path is None else source.path.parent
        path = folder / Path(recipe.plan).expanduser()
        read = read_named(path, option="budget.plan", kind="plan")
    else:
        read = Source.parse(json.dumps(recipe.plan), "budget.plan")
    check_kind(read, takes=("plan",), command="budget.plan")
    plan = read.validate(PlanDocument)
    return recipe.model_copy(update={"budget": BudgetMapping(plan=plan.to_data())})


def with_allocator(policy: str, allocator: str | None) -> str:
    """Return a policy string with an allocator as its modifier.

    Raises:
        UsageError: the policy has one already, or cannot carry one.
    """
    if allocator is None:
        return policy
    from kvtool.policies.allocate.head_split import HeadSplit
    from kvtool.policies.allocate.table import parse_allocator
    from kvtool.policies.grammar import parse_policy

    parsed, chosen = parse_policy(policy), parse_allocator(allocator)
    place = "heads" if isinstance(chosen, HeadSplit) else "allocate"
    given = getattr(parsed, place)
    if given is not None:
        raise UsageError(
            f"policy `{policy}` has the allocator `{given.modifier}` already",
            hint=f"leave out --allocator {allocator}",
        )
    return str(replace(parsed, **{place: chosen}))
