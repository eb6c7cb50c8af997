"""Resolve recipe, plan and flags: built-in < recipe < plan < flags < `--set`.

Each flag is set in its place of a recipe.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

from kvtool.documents.files import expand
from kvtool.documents.plan import PlanDocument
from kvtool.documents.recipe import Recipe
from kvtool.documents.recipe_source import Check, read_recipe, resolve_includes
from kvtool.documents.settings import MODEL_SETTINGS, settings_of
from kvtool.documents.source import Source, check_kind, read_named
from kvtool.documents.tree import DocumentError, Node, Problem
from kvtool.errors import UsageError, quote
from kvtool.sizes import parse_count


class Flags:
    """Settings that are laid over a recipe, weakest first.

    Attributes:
        values: each flag as typed, and its value nested as in a recipe.
        defaults: those of the environment, in the same form, which a recipe overrides.
    """

    def __init__(self, environment: Sequence[str] = ()) -> None:
        """Begin without a flag.

        Args:
            environment: settings that variables of the environment gave.
        """
        self.values: list[tuple[str, dict[str, Any]]] = []
        self.defaults: list[tuple[str, dict[str, Any]]] = []
        self._environment = {f"--{name.replace('_', '-')}" for name in environment}

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
        weak = flag.split()[0] in self._environment
        (self.defaults if weak else self.values).append((flag, value))

    def left_open(self, source: Source | None) -> list[tuple[str, dict[str, Any]]]:
        """Return the defaults of the environment whose keys a recipe does not have."""
        node = None if source is None else resolve_includes(source).node
        if node is None:
            return self.defaults
        return [(flag, values) for flag, values in self.defaults if not _has(node, values)]

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
        """Return whether a flag sets a key of a recipe."""
        return any(key in values for _, values in self.values)

    def check_beside_plan(self, plan: str) -> None:
        """Refuse a budget or an allocator beside a plan, which brings both.

        Args:
            plan: the file it was read from.

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


def _has(node: Node, values: Any) -> bool:
    """Return whether a recipe has the key of a value that is nested as in a recipe."""
    if not isinstance(values, dict):
        return True
    ((key, value),) = values.items()
    inner = node.child(key)
    return inner is not None and (not isinstance(inner.value, dict) or _has(inner, value))


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


Value = TypeVar("Value")
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
    check: Check | None = None,
) -> Resolved:
    """Return the recipe that a document and flags mean.

    Args:
        source: a recipe or a plan, not yet validated or a plan that is; None for neither.
        sets, unsets: `--set` and `--unset` flags.
        command: as typed, such as `kvtool eval`.
        check_named: refuses policies that no file may name, given their place and the kind of
            document.
        check: finds further mistakes, as for `read_recipe`.

    Raises:
        DocumentError: every mistake, with its place or its flag.
        UsageError: the recipe cannot be read.
    """
    given, piped, name = flags.values, None, "the plan"
    own = flags.sets("policy") or any(text.partition("=")[0].strip() == "policy" for text in sets)
    if isinstance(source, PlanDocument):
        flags.check_beside_plan(name)
        source, piped = None, source
    elif source is not None:
        check_kind(source, takes=("recipe", "plan"), command=command)
        if source.kind == "plan":
            flags.check_beside_plan(source.name)
            name, piped, source = source.name, source.validate(PlanDocument), None
        elif _names_plan(source):
            flags.check_beside_plan(f"{source.name}: budget.plan")
    if piped is not None:
        if not own:
            check_named([piped.policy], name, _SAVED)
        given = [(name, _values_of_plan(piped)), *given]
    if source is not None and source.path is not None and source.path.name == _LOCK and not own:
        node = source.node.child("policy")
        chosen = None if node is None else node.data
        check_named(chosen if isinstance(chosen, list) else [chosen], source.name, _SAVED)

    def check_all(recipe: Recipe, source: Source) -> list[Problem]:
        _check_code(source, check_named)
        return [] if check is None else check(recipe, source)

    given = [*flags.left_open(source), *given]
    recipe, found = read_recipe(source or Source.empty(), given, sets, unsets, check_all)
    if recipe.plan is not None and recipe.allocator is not None:
        raise UsageError(
            f"allocator `{recipe.allocator}` and a plan exclude each other: the plan has split its "
            "budget already",
            hint="leave out one of them",
        )
    return Resolved(recipe, found, _plan_of(recipe, found, piped))


def _check_code(source: Source, check_named: CheckNamed) -> None:
    """Refuse code that a file names: scores of one's own, tasks of one's own.

    What a flag or a Python call says has no place in a text, and may name code.

    Raises:
        UsageError: the first such name.
    """
    for key in ("policy", "modifiers"):
        for node in _items(source.node.child(key)):
            named = node.child("name") or node
            if named.mark.index is not None:
                check_named([named.data], named.mark.name, "a recipe")
    evaluation = source.node.child("eval")
    for i, task in enumerate(_items(evaluation.child("tasks") if evaluation else None)):
        named = task.child("task") or task
        if named.mark.index is not None and ":" in str(named.data):
            raise UsageError(
                f"`{named.mark.name}` names task {quote(named.data)}, which may run code, and no "
                "file may name code",
                hint=f"--tasks '{named.data}'",
            )
        folder = task.child("include_path")
        if folder is not None and folder.value is not None and folder.mark.index is not None:
            raise UsageError(
                f"`{folder.mark.name}` names tasks in {quote(folder.data)}, which may "
                "run code, and no file may name code",
                hint=f"--set eval.tasks.{i}.include_path=FOLDER",
            )


def _items(node: Node | None) -> list[Node]:
    if node is None:
        return []
    return node.value if isinstance(node.value, list) else [node]


def _names_plan(source: Source) -> bool:
    """Whether a recipe, or one that it includes, gives its budget by a plan."""
    budget = resolve_includes(source).node.child("budget")
    plan = None if budget is None else budget.child("plan")
    return plan is not None and plan.value is not None


def _values_of_plan(plan: PlanDocument) -> dict[str, Any]:
    """Return what a plan says, in the form of a recipe."""
    values: dict[str, Any] = {
        "model": {"id": plan.model.id, "revision": plan.model.revision},
        "budget": {"plan": plan.to_data()},
    }
    return values if plan.policy is None else values | {"policy": plan.policy}


def _plan_of(recipe: Recipe, source: Source, piped: PlanDocument | None) -> PlanDocument | None:
    """Return the plan that a recipe holds, or names relative to its own file.

    Args:
        piped: a plan that has been read already, which flags may have changed since.
    """
    if recipe.plan is None:
        return None
    if piped is not None and recipe.plan == piped.to_data():
        return piped
    if isinstance(recipe.plan, str):
        folder = Path() if source.path is None else source.path.parent
        path = folder / expand(recipe.plan)
        read = read_named(path, option="budget.plan", kind="plan")
    else:
        read = Source.parse(json.dumps(recipe.plan), "budget.plan")
    check_kind(read, takes=("plan",), command="budget.plan")
    return read.validate(PlanDocument)


class OneReading(Generic[Value]):
    """What a recipe means in one respect, read while the recipe is checked and kept.

    Args:
        read: reads it.
    """

    def __init__(self, read: Callable[[Recipe, Source], Value]) -> None:
        self._read = read
        self._value: list[Value] = []
        self._mistake: UsageError | None = None

    def problems(self, recipe: Recipe, source: Source) -> list[Problem]:
        """Read; return what is wrong in the document, while other mistakes wait."""
        try:
            self._value = [self._read(recipe, source)]
        except DocumentError as error:
            return error.problems
        except UsageError as error:
            self._mistake = error
        return []

    def value(self) -> Value:
        """Return what was read.

        Raises:
            UsageError: the mistake that waited until the document was right.
        """
        if self._mistake is not None:
            raise self._mistake
        return self._value[0]
