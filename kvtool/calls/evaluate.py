"""Comparisons run in one call: prepared, measured in a folder, scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.calls.eval_settings import EvalSettings
from kvtool.calls.from_python import check_keywords, keywords_of, takes
from kvtool.documents.plan import PlanDocument
from kvtool.documents.recipe import Recipe
from kvtool.documents.resolve import document_of, flags_of
from kvtool.documents.results import ResultsDocument
from kvtool.documents.source import Source, is_document
from kvtool.evaluation.comparison import Comparison, read_comparison
from kvtool.evaluation.run.gates import Gate
from kvtool.evaluation.tasks.selection import TaskFlags
from kvtool.models.attached import ModelSource
from kvtool.policies.grammar import parse_policy
from kvtool.sizes import Budget
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.evaluation.prepare import PlannedDevice

_TASK_SETTINGS = ("lengths", "depths", "samples", "prompts")


@takes(EvalSettings, leave_out=("plan",))
def evaluate(
    recipe: Any = None,
    folder: str | Path | None = None,
    *,
    tasks: str | Sequence[str] = (),
    policies: str | Sequence[Any] = (),
    budgets: str | int | float | Sequence[str | int | float] = (),
    model: Any = None,
    tokenizer: Any = None,
    data: Mapping[str, str] | None = None,
    fail_under: Mapping[str, float] | None = None,
    compare: str | Sequence[str] = (),
    watcher: Watcher | None = None,
    **settings: Any,
) -> ResultsDocument:
    """Compare policies under budgets on benchmarks, in a folder that a broken-off run goes on in.

    Args:
        recipe: a recipe or a plan as a document, its data or its file. Or a model as a folder, a
            hub ID or loaded (then with its `tokenizer`); None is the bundled reference model.
        model: in place of that of the recipe or plan.
        folder: of the run; None: that of the recipe, or one under `runs/`.
        tasks, policies, budgets: as `kvtool eval` takes them, in place of the recipe's.
        compare: pairs of policies, `mine,h2o`, whose p-values are corrected for their number.
        watcher: takes notes and progress; None: no caller does.

    `settings` are those of `EvalSettings`; each is what the option of `kvtool eval` with its name
    is.

    Returns:
        What `results.json` in the folder holds.

    Raises:
        UsageError: settings that are wrong or do not go together.
        KvtoolError: data or weights that cannot be read, a folder that cannot be written.
    """
    check_keywords("evaluate", settings, keywords_of(EvalSettings, leave_out=("plan",)))
    source, named = _read(recipe)
    if source is not None or model is not None:
        named = model
    where = ModelSource.of(named, tokenizer)
    asked = EvalSettings(model=where.name, compare=_listed(compare), **settings)
    comparison = compared(
        asked,
        source,
        tasks=_listed(tasks),
        policies=[_policy(policy) for policy in _listed(policies)],
        budgets=[_budget(budget) for budget in _listed(budgets)],
        data=data or {},
        gates=[Gate(task, least=least) for task, least in (fail_under or {}).items()],
        command="kvtool.evaluate",
    )
    watcher = Watcher() if watcher is None else watcher
    from kvtool.evaluation.measure import run_prepared
    from kvtool.evaluation.prepare import prepare

    prepared = prepare(
        comparison,
        None if folder is None else str(folder),
        replace(asked.source(), loaded=where.loaded),
        watcher=watcher,
        device=planned_device(asked, comparison),
        overwrite=asked.overwrite,
    )
    overwrite, stop_on_error = asked.overwrite, not asked.continue_on_error
    return run_prepared(prepared, watcher, overwrite=overwrite, stop_on_error=stop_on_error)


def planned_device(settings: EvalSettings, comparison: Comparison) -> PlannedDevice:
    """Return the device that settings name, once it is known that something is planned in it."""
    from kvtool.evaluation.auto_budget import asks_device
    from kvtool.evaluation.prepare import PlannedDevice

    settings.check_memory(used=asks_device(comparison))
    return PlannedDevice(settings.memory_there, settings.elsewhere, settings.strict)


def compared(
    settings: EvalSettings,
    source: Source | PlanDocument | None,
    *,
    tasks: list[str],
    policies: list[str],
    budgets: list[Any],
    data: Mapping[str, str],
    gates: list[Gate],
    command: str,
) -> Comparison:
    """Return what is compared, by a recipe or plan and the settings over it.

    Args:
        source: a recipe or a plan, None for neither.
        data: of tasks by name.
        gates: those that settings name by task.
        command: as typed, for errors.

    Raises:
        DocumentError, UsageError: every mistake that shows without the model.
    """
    flags = flags_of(settings)
    flags.set("--tasks", [{"task": name} for name in tasks], "eval", "tasks")
    flags.set("--policy", policies, "policy")
    flags.set("--budget", budgets, "budget")
    values = {name: getattr(settings, name) for name in _TASK_SETTINGS}
    return read_comparison(
        source,
        flags,
        TaskFlags(values, data),
        [*gates, *settings.gates()],
        sets=settings.set,
        unsets=settings.unset,
        command=command,
    )


def _read(given: Any) -> tuple[Source | PlanDocument | None, Any]:
    """Return a recipe or plan, or a model: whichever is given."""
    if given is None:
        return None, None
    named = isinstance(given, (str, Path)) and not is_document(given)
    if named or not isinstance(given, (str, Path, Mapping, Recipe, PlanDocument)):
        return None, given
    return document_of(given, "a recipe or plan"), None


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _policy(policy: Any) -> str:
    return policy if isinstance(policy, str) else str(parse_policy(policy))


def _budget(budget: Any) -> str | int:
    typed = isinstance(budget, (str, int)) and not isinstance(budget, bool)
    return budget if typed else str(Budget.parse(budget))
