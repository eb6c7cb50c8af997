"""Resolve recipe, plan and flags: built-in < environment < recipe < plan < flags < `--set`.

Each flag is set in its place of a recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from kvtool.documents.files import expand
from kvtool.documents.overrides import apply_sets, overlay, resolve_includes, spell_out
from kvtool.documents.plan import PlanDocument
from kvtool.documents.recipe import Recipe
from kvtool.documents.settings import settings_of
from kvtool.documents.source import Source, check_kind, read_file, source_of
from kvtool.documents.tree import DocumentError, Mark, Node, Problem
from kvtool.errors import UsageError, quote
from kvtool.sizes import parse_count


class Flags:
    """Settings beside a recipe, weakest first: each flag as typed, and its value as a recipe's.

    The recipe overrides `defaults`, which are of the environment, and `values` override the recipe.
    """

    def __init__(self, environment: Sequence[str] = ()) -> None:
        self._environment = {f"--{name.replace('_', '-')}" for name in environment}
        self.values: list[tuple[str, dict[str, Any]]] = []
        self.defaults: list[tuple[str, dict[str, Any]]] = []

    def set(self, flag: str, value: Any, *keys: str) -> None:
        """Set the value of a flag as typed at `keys`, unless it is None or an empty list."""
        if value is None or value == []:
            return
        for key in reversed(keys):
            value = {key: value}
        weak = flag.split()[0] in self._environment
        (self.defaults if weak else self.values).append((flag, value))


def flags_of(settings: Any) -> Flags:
    """Return what settings set in a recipe: every field whose flag has a place there."""
    flags = Flags(getattr(settings, "environment", ()))
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


CheckNamed = Callable[[Sequence[Any], str, str], None]

_LOCK = "recipe.lock.yaml"  # of a run's folder
_SAVED = "a run or a plan"


@dataclass(frozen=True)
class Resolved:
    """A recipe with everything over it.

    Attributes:
        source: the file and line of each part of the recipe.
        plan: gives the budget, if there is one.
    """

    recipe: Recipe
    source: Source
    plan: PlanDocument | None


def resolve(
    source: Source | PlanDocument | None,
    flags: Flags,
    *,
    sets: Sequence[str] = (),
    unsets: Sequence[str] = (),
    command: str,
    check_named: CheckNamed,
) -> Resolved:
    """Return the recipe that a document and flags mean.

    Args:
        source: a recipe or a plan, not yet validated or a plan that is; None for neither.
        sets, unsets: `--set` and `--unset` flags.
        command: as typed, such as `kvtool eval`.
        check_named: refuses policies that no file may name, given their place and the kind of
            document.

    Raises:
        DocumentError: every mistake, with its place or its flag.
        UsageError: the recipe cannot be read.
    """
    own = any("policy" in values for _, values in flags.values) or any(
        text.partition("=")[0].strip() == "policy" for text in sets
    )
    plan, planned = None, None
    if isinstance(source, PlanDocument):
        plan, planned, source = source, "the plan", None
    elif source is not None:
        check_kind(source, takes=("recipe", "plan"), command=command)
        if source.kind == "plan":
            plan, planned, source = source.validate(PlanDocument), source.name, None
        else:
            source = resolve_includes(source)
            named = source.find(("budget", "plan"))
            if named is not None and named.value is not None:
                planned = f"{source.name}: budget.plan"
    if planned is not None:
        _check_beside_plan(flags, planned)
    given = flags.values
    if plan is not None and planned is not None:
        if not own:
            check_named([plan.policy], planned, _SAVED)
        given = [(planned, _values_of_plan(plan)), *given]
    if source is not None and source.path is not None and source.path.name == _LOCK and not own:
        policies = source.node.child("policy")
        check_named([node.data for node in _items(policies)], source.name, _SAVED)
    recipe, found = read_recipe(source or Source.empty(), given, sets, unsets, flags.defaults)
    _check_code(found, check_named)
    if recipe.plan is not None and recipe.allocator is not None:
        raise UsageError(
            f"allocator `{recipe.allocator}` and a plan exclude each other: the plan has split its "
            "budget already",
            hint="leave out one of them",
        )
    return Resolved(recipe, found, _plan_of(recipe, found, plan))


def read_recipe(
    source: Source,
    flags: Sequence[tuple[str, dict[str, Any]]] = (),
    sets: Sequence[str] = (),
    unsets: Sequence[str] = (),
    defaults: Sequence[tuple[str, dict[str, Any]]] = (),
) -> tuple[Recipe, Source]:
    """Return the recipe, and the document that all of it is from.

    Args:
        source: a document of kind `recipe`.
        flags: what flags set, weakest first: the flag as typed, and values nested as in a recipe.
        sets, unsets: `--set` and `--unset` flags, stronger than the others.
        defaults: as `flags`, weaker than the document.

    Raises:
        DocumentError: every mistake, each with its file and position, or its flag.
    """
    own = resolve_includes(source).node
    node = Node({}, own.mark)
    layers = [Node.of(values, Mark(origin)) for origin, values in [*defaults, *flags]]
    for layer in [*layers[: len(defaults)], own, *layers[len(defaults) :]]:
        node = overlay(node, spell_out(layer))
    source = apply_sets(replace(source, node=node), sets, unsets)
    source = replace(source, node=spell_out(source.node))
    return source.validate(Recipe), source


def _check_beside_plan(flags: Flags, plan: str) -> None:
    """Refuse a budget or an allocator beside a plan, which brings both."""
    for flag, values in flags.values:
        if values.keys() & {"budget", "allocator"}:
            raise UsageError(
                f"{flag} and the plan in `{plan}` exclude each other: a plan brings its own "
                "budgets",
                hint="leave out one of them, or make another plan with kvtool plan-budget",
            )


def _check_code(source: Source, check_named: CheckNamed) -> None:
    """Refuse code that a file names; what a flag or a Python call says has no place in a text."""
    for key in ("policy", "modifiers"):
        for node in _items(source.node.child(key)):
            named = node.child("name") or node
            if named.mark.in_text:
                check_named([named.data], named.mark.name, "a recipe")
    for i, task in enumerate(_items(source.find(("eval", "tasks")))):
        named, folder = task.child("task") or task, task.child("include_path")
        flag = f"--tasks '{named.data}'"
        wrong = named if ":" in str(named.data) and named.mark.in_text else None
        if folder is not None and folder.value is not None and folder.mark.in_text:
            wrong, flag = folder, f"--set eval.tasks.{i}.include_path=FOLDER"
        if wrong is not None:
            raise UsageError(
                f"`{wrong.mark.name}` names tasks in {quote(wrong.data)}, which may run code, and "
                "no file may name code",
                hint=flag,
            )


def _items(node: Node | None) -> list[Node]:
    if node is None:
        return []
    return node.value if isinstance(node.value, list) else [node]


def _values_of_plan(plan: PlanDocument) -> dict[str, Any]:
    """Return what a plan says, in the form of a recipe."""
    values: dict[str, Any] = {
        "model": {"id": plan.model.id, "revision": plan.model.revision},
        "budget": {"plan": plan.to_data()},
    }
    return values if plan.policy is None else values | {"policy": plan.policy}


def _plan_of(recipe: Recipe, source: Source, piped: PlanDocument | None) -> PlanDocument | None:
    """Return the plan that a recipe holds, or names relative to its own file; `piped` if it is."""
    if recipe.plan is None:
        return None
    if piped is not None and recipe.plan == piped.to_data():
        return piped
    if isinstance(recipe.plan, str):
        folder = Path() if source.path is None else source.path.parent
        read = read_file(folder / expand(recipe.plan), option="budget.plan", kind="plan")
    else:
        read = Source("budget.plan", Node.of(recipe.plan, Mark("budget.plan")))
    return read.take(PlanDocument, command="budget.plan")


Policy = TypeVar("Policy")


def parse_policies(recipe: Recipe, source: Source, parse: Callable[[str], Policy]) -> list[Policy]:
    """Parse every policy with its modifiers; `parse` raises `UsageError` where it cannot.

    Raises:
        DocumentError: every policy that cannot be read, at its place or that of the modifiers.
    """
    parsed: list[Policy] = []
    problems: dict[str, Problem] = {}
    listed = isinstance(getattr(source.node.child("policy"), "value", None), list)
    for i, whole in enumerate(recipe.policies()):
        try:
            parsed.append(parse(whole))
            continue
        except UsageError as error:
            problem = source.problem(("modifiers",), str(error))
        try:
            parse(str((recipe.policy or [])[i]))
        except UsageError as error:
            problem = source.problem(("policy", i) if listed else ("policy",), str(error))
        problems[str(problem)] = problem
    if problems:
        raise DocumentError(list(problems.values()))
    return parsed


def gather(*reads: Callable[[], Any]) -> list[Any]:
    """Return what each of several readings gives, or raise the mistakes of all of them at once."""
    values, problems, mistake = [], [], None
    for read in reads:
        try:
            values.append(read())
        except DocumentError as error:
            problems += error.problems
        except UsageError as error:
            mistake = mistake or error
    if problems:
        raise DocumentError(
            sorted(problems, key=lambda problem: (problem.mark.name, problem.mark.index or 0))
        )
    if mistake is not None:
        raise mistake
    return values


def document_of(given: Any, what: str) -> Source | PlanDocument:
    """Return what a Python call is given: a document (a plan stays one), its data or its file."""
    if isinstance(given, PlanDocument):
        return given
    return source_of(given.to_data() if isinstance(given, Recipe) else given, what)
