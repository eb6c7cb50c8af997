"""Comparisons run in one call: prepared, measured in a folder, scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtool.documents.flags import MODEL_SETTINGS, Flags
from kvtool.documents.given import document_of, is_document
from kvtool.documents.plan import PlanDocument
from kvtool.documents.recipe import Recipe
from kvtool.documents.results import ResultsDocument
from kvtool.documents.source import Source
from kvtool.evaluation.comparison import read_comparison
from kvtool.evaluation.run.gates import Gate
from kvtool.evaluation.tasks.selection import TaskFlags
from kvtool.models.attached import ModelSource
from kvtool.policies.grammar import parse_policy
from kvtool.sizes import Budget
from kvtool.watcher import Watcher


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
    lengths: Any = None,
    depths: Any = None,
    samples: int | None = None,
    prompts: str | None = None,
    limit: int | None = None,
    baseline: bool | None = None,
    query_agnostic: bool = False,
    keep_question: bool = False,
    chat_template: str | None = None,
    max_length: int | None = None,
    truncate: str | None = None,
    prefill: str | None = None,
    shared_prefill: bool = False,
    allocator: str | None = None,
    seed: int | None = None,
    fail_under: Mapping[str, float] | None = None,
    max_drop: float | None = None,
    within: float | None = None,
    continue_on_error: bool = True,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    watcher: Watcher | None = None,
    **model_settings: Any,
) -> ResultsDocument:
    """Compare policies under budgets on benchmarks, in a folder that a broken-off run goes on in.

    Args:
        recipe: a recipe or a plan as a document, its data or its file; a model as a folder, a hub
            ID or loaded (then with its `tokenizer`); None is the bundled reference model.
        model: in place of that of the recipe or plan.
        folder: of the run; None: that of the recipe, or one under `runs/`.
        tasks, policies, budgets: as `kvtool eval` takes them, in place of the recipe's.
        watcher: is told how it goes; by default nobody is.
        model_settings: `revision`, `dtype`, `device`, `device_map`, `tensor_parallel`,
            `attn_implementation`.

    Every other argument is what the option of `kvtool eval` with its name is.

    Returns:
        What `results.json` in the folder holds.

    Raises:
        UsageError: settings that are wrong or do not go together.
        KvtoolError: data or weights that cannot be read, a folder that cannot be written.
    """
    unknown = model_settings.keys() - set(MODEL_SETTINGS)
    if unknown:
        raise TypeError(f"evaluate() got an unexpected keyword argument {min(unknown)!r}")
    source, named = _read(recipe)
    if source is not None or model is not None:
        named = model
    where = ModelSource.of(named, tokenizer)
    flags = Flags()
    flags.take_model(where.name, model_settings)
    flags.take("seed", seed)
    flags.take("allocator", allocator)
    flags.set("--tasks", [{"task": name} for name in _listed(tasks)], "eval", "tasks")
    flags.set("--policy", [_policy(policy) for policy in _listed(policies)], "policy")
    flags.set("--budget", [_budget(budget) for budget in _listed(budgets)], "budget")
    take_eval(
        flags,
        baseline=baseline,
        limit=limit,
        chat_template=chat_template,
        max_length=max_length,
        truncate=truncate,
        query_agnostic=query_agnostic,
        keep_question=keep_question,
        prefill=prefill,
        shared_prefill=shared_prefill,
        within=within,
    )
    values = {"lengths": lengths, "depths": depths, "samples": samples, "prompts": prompts}
    gates = [Gate(task, least=least) for task, least in (fail_under or {}).items()]
    if max_drop is not None:
        gates.append(Gate("*", max_drop=max_drop))
    comparison = read_comparison(
        source, flags, TaskFlags(values, data or {}), gates, command="kvtool.evaluate"
    )
    watcher = Watcher() if watcher is None else watcher
    from kvtool.evaluation.measure import run_prepared
    from kvtool.evaluation.prepare import prepare

    prepared = prepare(
        comparison,
        None if folder is None else str(folder),
        watcher=watcher,
        trust_remote_code=trust_remote_code,
        loaded=where.loaded,
    )
    return run_prepared(prepared, watcher, overwrite=overwrite, stop_on_error=not continue_on_error)


def take_eval(
    flags: Flags,
    *,
    query_agnostic: bool,
    keep_question: bool,
    shared_prefill: bool,
    prefill: str | None,
    **settings: Any,
) -> None:
    """Set what flags say of a recipe's `eval`, and how prompts are fed.

    Args:
        settings: keys of `eval` under their own names.
    """
    for name, value in settings.items():
        flags.take(name, value, "eval")
    if query_agnostic:
        flags.set("--query-agnostic", False, "eval", "query_aware")
    if keep_question:
        flags.set("--keep-question", True, "eval", "keep_question")
    if shared_prefill:
        flags.set("--shared-prefill", True, "eval", "shared_prefill")
    flags.take("prefill", prefill)


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
