"""Comparisons run in one call: prepared, measured in a folder, scored."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.calls.eval_settings import EvalSettings
from kvtool.calls.from_python import check_keywords, keywords_of, takes
from kvtool.documents.files import expand
from kvtool.documents.plan import PlanDocument
from kvtool.documents.recipe import ModelChoice, Recipe
from kvtool.documents.resolve import document_of, flags_of, read_recipe
from kvtool.documents.results import ResultsDocument
from kvtool.documents.settings import settings_of
from kvtool.documents.source import Source, is_document, read_source
from kvtool.errors import UsageError
from kvtool.evaluation.comparison import Comparison, outline, read_comparison
from kvtool.evaluation.run.gates import Gate, parse_least
from kvtool.evaluation.run.index import RESULTS, read_results_file
from kvtool.evaluation.tasks.selection import TaskFlags, parse_data
from kvtool.evaluation.tasks.table import task_class
from kvtool.models.attached import ModelSource
from kvtool.models.placement import resolve_device
from kvtool.policies.grammar import parse_policy
from kvtool.policies.installed import placed
from kvtool.policies.outside import module_of
from kvtool.sizes import Budget
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.evaluation.prepare import Prepared
    from kvtool.models.load import Loaded

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
    comparison = _compared(
        asked,
        source,
        tasks=_listed(tasks),
        policies=[_policy(policy) for policy in _listed(policies)],
        budgets=[_budget(budget) for budget in _listed(budgets)],
        data=data or {},
        gates=[Gate(task, least=least) for task, least in (fail_under or {}).items()],
        command="kvtool.evaluate",
        loaded=where.loaded,
    )
    watcher = Watcher() if watcher is None else watcher
    given = None if folder is None else str(folder)
    run = EvalRun(asked, comparison, replace(asked.source(), loaded=where.loaded), given)
    return run.run(watcher)


@dataclass(frozen=True)
class EvalRun:
    """A comparison that is all checked, as far as that goes without the model.

    Attributes:
        source: where the model comes from.
        folder: of the run; None: that of the recipe, or one under `runs/`.
    """

    settings: EvalSettings
    comparison: Comparison
    source: ModelSource
    folder: str | None

    def describe(self, watcher: Watcher) -> tuple[Any, list[str]]:
        """Return what a dry run prints, and what it says; without the hub, what is known anyway."""
        outlined = outline(self.comparison, self.folder)
        if outlined is not None:
            return outlined.describe(), [outlined.missing]
        from kvtool.evaluation.prepare import memory_in_words

        description = self.prepare(watcher).describe()
        return description, memory_in_words(description)

    def prepare(self, watcher: Watcher) -> Prepared:
        """Draw all samples, once it is known that something is planned in a memory that is given.

        Raises:
            UsageError, KvtoolError: as `evaluate`.
        """
        from kvtool.evaluation.auto_budget import asks_device
        from kvtool.evaluation.prepare import PlannedDevice, prepare

        settings, comparison = self.settings, self.comparison
        settings.check_memory(used=asks_device(comparison))
        device = PlannedDevice(settings.memory_there, settings.elsewhere, settings.strict)
        return prepare(
            comparison,
            self.folder,
            self.source,
            watcher=watcher,
            device=device,
            overwrite=settings.overwrite,
        )

    def run(self, watcher: Watcher, argv: Sequence[str] | None = None) -> ResultsDocument:
        """Measure what is missing, and return the results."""
        prepared = self.prepare(watcher)
        from kvtool.evaluation.measure import run_prepared
        from kvtool.generation.graphs import recording

        with recording(self.settings.graphs):
            return run_prepared(
                prepared,
                watcher,
                overwrite=self.settings.overwrite,
                stop_on_error=not self.settings.continue_on_error,
                argv=argv,
            )


def load_results(folder: str | Path) -> ResultsDocument:
    """Return the results of a run, as `kvtool.evaluate` returned them.

    Nothing that the run names is imported.

    Args:
        folder: of the run, or its `results.json`.

    Raises:
        UsageError: no run is there, or one of another schema version.
        KvtoolError: a damaged file.
    """
    path = expand(str(folder))
    if path.is_dir():
        path = path / RESULTS
    if not path.is_file():
        raise UsageError(
            f"no results in `{folder}`", hint="a run of kvtool eval or kvtool.evaluate has them"
        )
    return read_results_file(path)


def _compared(
    settings: EvalSettings,
    source: Source | PlanDocument | None,
    *,
    tasks: list[str],
    policies: list[str],
    budgets: list[Any],
    data: Mapping[str, str],
    gates: list[Gate],
    command: str,
    loaded: Loaded | None = None,
) -> Comparison:
    """Return what is compared, by a recipe or plan and the settings over it."""

    def device(choice: ModelChoice) -> str:
        if loaded is not None:
            return str(loaded.model.device)
        return resolve_device(choice.device, choice.device_map, elsewhere=settings.elsewhere)

    flags = flags_of(settings)
    flags.set("--tasks", [{"task": name} for name in tasks], "eval", "tasks")
    for name, value in (("policy", policies), ("budget", budgets)):
        flags.set(f"--{name}", value, name)
    values = {name: getattr(settings, name) for name in _TASK_SETTINGS}
    return read_comparison(
        source,
        flags,
        TaskFlags(values, data),
        [*gates, *settings.gates()],
        sets=settings.set,
        unsets=settings.unset,
        command=command,
        device=device,
    )


# ---- as `kvtool eval` is asked


def read_run(options: EvalSettings) -> EvalRun:
    """Return what is compared, by the recipe and the flags over it.

    Raises:
        DocumentError, UsageError: every mistake that shows without the model.
    """
    path = options.recipe
    comparison = _compared(
        options,
        read_source(path, option="recipe or plan") if isinstance(path, str) else path,
        tasks=_given("--tasks", options.tasks, _split),
        policies=_given("--policy", options.policy, split_policies),
        budgets=_given("--budget", options.budget, _split),
        data=parse_data(options.data),
        gates=[parse_least(text) for text in options.fail_under],
        command="kvtool eval",
    )
    return EvalRun(options, comparison, options.source(), options.output)


def rescore_run(options: EvalSettings, watcher: Watcher) -> ResultsDocument:
    """Score the stored answers of a run anew.

    Policies and tasks from outside the package are imported where the flags name them: a run's
    folder never does.

    Raises:
        UsageError: no run there, flags that say what to run.
    """
    folder = expand(options.rescore or "")
    if not options.rescore or not folder.is_dir():
        raise UsageError(f"--rescore: no folder `{options.rescore}`")
    policies, tasks = split_policies(options.policy), _split(options.tasks)
    fine, plain = set(_FOR_RESCORE), EvalSettings(rescore=options.rescore)
    fine |= {"policy"} if all(module_of(placed(each)) is not None for each in policies) else set()
    fine |= {"tasks"} if all(":" in each for each in tasks) else set()
    given = [
        "the recipe" if each.name == "recipe" else f"--{each.name.replace('_', '-')}"
        for each in settings_of(EvalSettings)
        if each.name not in fine and getattr(options, each.name) != getattr(plain, each.name)
    ]
    if given:
        hint = None if options.guarantee is None else "chosen afterwards: no guarantee"
        raise UsageError(f"--rescore takes a run as it is; leave out {', '.join(given)}", hint=hint)
    read_recipe(Source.empty(), flags_of(options).values)  # which has the bounds of `within`
    for text in policies:
        parse_policy(text)
    for name in tasks:
        task_class(name, imports=True)
    from kvtool.evaluation.measure import rescore

    gates = [*map(parse_least, options.fail_under), *options.gates()]
    return rescore(folder, gates, watcher, within=options.within, pairs=options.compare or None)


_FOR_RESCORE = frozenset(
    {"rescore", "fail_under", "max_drop", "within", "compare", "plots"}
    | {"format", "quiet", "progress", "debug"}
)


def _given(flag: str, texts: list[str], split: Callable[[list[str]], list[str]]) -> list[str]:
    """Return the parts of a flag's values, and refuse a flag without any."""
    parts = split(texts)
    if texts and not parts:
        raise UsageError(f"{flag} is empty")
    return parts


def split_policies(texts: list[str]) -> list[str]:
    """Split at commas outside brackets.

    >>> split_policies(["h2o(recent=8,x=1)+caote,tova", "roco"])
    ['h2o(recent=8,x=1)+caote', 'tova', 'roco']
    """
    parts = [part.strip() for text in texts for part in re.split(r",(?![^(]*\))", text)]
    return [part for part in parts if part]


def _split(texts: list[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


# ---- as Python is asked


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
