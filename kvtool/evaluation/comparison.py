"""Put recipe and flags of a comparison together, and check them before any model is loaded.

The folder that its run is written to is checked with them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.documents.claim import Claim, check_claim
from kvtool.documents.files import check_name, expand
from kvtool.documents.plan import PlanDocument
from kvtool.documents.recipe import ModelChoice, Recipe
from kvtool.documents.resolve import Flags, gather, parse_policies, resolve
from kvtool.documents.settings import Asking, Protocol
from kvtool.documents.source import Source
from kvtool.errors import UsageError
from kvtool.evaluation.pairs import asked_pairs, variant_entry
from kvtool.evaluation.run.gates import Gate, check_gates
from kvtool.evaluation.tasks.selection import TaskFlags, hub_data, read_tasks
from kvtool.evaluation.tasks.task import Task
from kvtool.models.folder import REFERENCE, Unreachable, check_folder, check_hub, check_hub_data
from kvtool.planning.variants import BASELINE, Variant, make_variants
from kvtool.policies.grammar import check_imported, parse_policy, with_allocator
from kvtool.sizes import DEFAULT_BUDGET, Budget, says_default_block, spell_prefill

if TYPE_CHECKING:
    from kvtool.policies.policy import Policy


@dataclass(frozen=True)
class Comparison:
    """A checked comparison.

    Attributes:
        recipe: everything resolved, so that the file alone repeats the run.
        left_out: tasks of a suite that lack their data.
    """

    recipe: Recipe
    tasks: list[Task]
    variants: list[Variant]
    protocol: Protocol
    gates: list[Gate]
    left_out: list[str]


def read_comparison(
    source: Source | PlanDocument | None,
    flags: Flags,
    task_flags: TaskFlags,
    gates: Sequence[Gate] = (),
    *,
    sets: Sequence[str] = (),
    unsets: Sequence[str] = (),
    command: str,
    device: Callable[[ModelChoice], str],
) -> Comparison:
    """Put a recipe and flags together; each policy and the plan are read once.

    Args:
        source: a recipe or a plan, None for neither.
        gates: those of flags, before those of the recipe.
        sets, unsets: `--set` and `--unset` flags.
        command: as typed, for errors.
        device: names the device that a recipe's model runs on.

    Raises:
        DocumentError, UsageError: every mistake that shows without the model.
    """
    resolved = resolve(
        source,
        flags,
        sets=sets,
        unsets=unsets,
        command=command,
        check_named=check_imported,
    )
    recipe, plan = resolved.recipe, resolved.plan
    policies, (chosen, left_out) = gather(
        lambda: _policies(recipe, resolved.source),
        lambda: read_tasks(task_flags, recipe, resolved.source),
    )
    if says_default_block(str(recipe.prefill)):
        own = max((policy.own_block or 0 for policy in policies), default=0)
        block = spell_prefill(str(recipe.prefill), device=device(recipe.model), own=own or None)
        recipe = recipe.model_copy(update={"prefill": block})
    budgets = recipe.budgets()
    variants = make_variants(
        policies,
        budgets,
        prefill=str(recipe.prefill or "full"),
        baseline=recipe.eval.baseline,
        plan=plan,
    )
    named = [str(variant.policy) for variant in variants]
    all_gates = [*gates] + [
        Gate(gate.task, least=gate.min, max_drop=gate.max_drop) for gate in recipe.gates
    ]
    check_gates(all_gates, [(task.name, task.best, task.lower_is_better) for task in chosen])
    claim = _claim(recipe, list(dict.fromkeys(named)), budgets)
    if recipe.eval.compare:
        asked_pairs(recipe.eval.compare, list(map(variant_entry, variants)))
    if any(gate.max_drop is not None for gate in all_gates) and BASELINE not in named:
        raise UsageError(
            "a largest drop is one from the full cache, which this run leaves out",
            hint="--baseline, or --fail-under TASK=V in place of --max-drop",
        )
    return Comparison(
        recipe=_lock(recipe, chosen, policies, budgets, plan).model_copy(update={"claim": claim}),
        tasks=chosen,
        variants=variants,
        protocol=_protocol(recipe),
        gates=all_gates,
        left_out=left_out,
    )


def _claim(recipe: Recipe, policies: list[str], budgets: list[Budget]) -> Claim | None:
    """Return the recipe's claim with policies and budgets spelled as in tables."""
    if recipe.claim is None:
        return None
    pairs = [
        pair.model_copy(
            update={
                "variant": str(parse_policy(pair.variant, imports=False)),
                "than": str(parse_policy(pair.than, imports=False)),
                "budgets": [str(Budget.parse(budget)) for budget in pair.budgets],
                "than_at": [str(Budget.parse(budget)) for budget in pair.than_at],
            }
        )
        for pair in recipe.claim.pairs
    ]
    claim = recipe.claim.model_copy(update={"pairs": pairs})
    check_claim(claim, policies, [str(budget) for budget in budgets])
    return claim


def _policies(recipe: Recipe, source: Source) -> list[Policy]:
    """Return the policies, those that evict with the allocator, if there is one."""
    if recipe.policy is None and not recipe.eval.baseline:
        raise UsageError("no policy to evaluate", hint="--policy streaming,h2o,h2o+caote")
    parsed = parse_policies(recipe, source, parse_policy)
    if recipe.allocator is None:
        return parsed
    return [
        policy if policy.when == "never" else with_allocator(policy, recipe.allocator)
        for policy in parsed
    ]


def _protocol(recipe: Recipe) -> Protocol:
    wanted, drawn = recipe.eval, recipe.generation
    wanted.check()
    return Protocol(
        **{each.name: getattr(wanted, each.name) for each in fields(Asking)},
        max_new_tokens=drawn.max_new_tokens,
        temperature=drawn.temperature,
        stop=tuple(drawn.stop),
        seed=recipe.seed,
    )


def _lock(
    recipe: Recipe,
    tasks: list[Task],
    policies: list[Policy],
    budgets: list[Budget],
    plan: PlanDocument | None,
) -> Recipe:
    """Return a recipe in which every task, setting, policy and budget is spelled out."""
    entries = [
        {"task": task.name, **task.model_dump(mode="json", exclude={"name"})} for task in tasks
    ]
    data = recipe.to_data()
    data["eval"]["tasks"] = entries
    data["policy"] = [str(policy) for policy in policies] or None
    data["modifiers"] = []
    sizes = [str(budget) for budget in budgets or [DEFAULT_BUDGET]]
    data["budget"] = sizes if plan is None else {"plan": plan.to_data()}
    data["allocator"] = None
    return Recipe(**{key: value for key, value in data.items() if value is not None})


_FILES = (".json", ".yaml", ".yml", ".txt")


def is_named(comparison: Comparison, output: str | None) -> bool:
    """Return whether the user has named the folder of a run."""
    return output not in (None, "-") or comparison.recipe.output.dir is not None


def run_folder(comparison: Comparison, output: str | None) -> Path:
    """Return the folder of the run, once it is known that it can be one."""
    if output is not None and not output.strip():
        raise UsageError("--output is empty", hint="--output runs/NAME")
    recipe = comparison.recipe
    given = recipe.output.dir if output in (None, "-") else output
    if given is not None:
        folder = expand(given)
    else:
        model = Path(recipe.model.id or REFERENCE).name
        tasks = "+".join(dict.fromkeys(task.name.partition("/")[0] for task in comparison.tasks))
        name = recipe.name or f"{model}_{tasks}_{date.today()}"
        folder = Path("runs") / re.sub(r"[^A-Za-z0-9.+_-]", "_", name)
    check_name(folder, "--output")
    for variant in comparison.variants:
        check_name(Path(variant.folder), "--policy")
    if not folder.is_dir() and (folder.exists() or folder.suffix.lower() in _FILES):
        raise UsageError(
            f"--output is the folder of a run, `{folder}` is or looks like a file",
            hint=f"--output {folder.with_suffix('')}; to save what is printed, redirect it with >",
        )
    return folder


@dataclass(frozen=True)
class Outline:
    """What is known of a comparison without the hub; `missing` is what the hub would give."""

    comparison: Comparison
    folder: Path
    missing: str

    def describe(self) -> dict[str, Any]:
        """Return the recipe and the work, in which samples and memory are unknown."""
        return {
            **self.comparison.recipe.to_data(),
            "work": {
                "folder": str(self.folder),
                "memory": None,
                "variants": [variant.name for variant in self.comparison.variants],
                "tasks": [{"task": task.name, "samples": None} for task in self.comparison.tasks],
                "measurements": None,
            },
        }


def outline(comparison: Comparison, folder: str | None) -> Outline | None:
    """Outline a comparison whose model or data only the hub has; None where nothing is missing.

    Args:
        folder: of the run; None: that of the recipe, or one under `runs/` named after the work.

    Raises:
        UsageError: a model that is neither here nor on the hub, no folder of a run.
    """
    model = comparison.recipe.model
    check_folder(model.id)
    place = run_folder(comparison, folder)
    try:
        check_hub(model.id, model.revision)
        for name in hub_data(comparison.tasks):
            check_hub_data(name)
    except Unreachable as error:
        return Outline(comparison, place, f"samples and memory: unknown, {error.message}")
    return None
