"""What `kvtool eval` is asked to do: recipe and flags put together and checked, without torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtool.cli.evaluation_tasks import read_tasks
from kvtool.cli.recipes import Flags, resolve, with_allocator
from kvtool.documents.plan import PlanDocument
from kvtool.documents.problems import DocumentError, Problem
from kvtool.documents.recipe import Recipe
from kvtool.documents.recipe_source import parse_policies
from kvtool.documents.source import Source
from kvtool.errors import UsageError
from kvtool.evaluation.bench.arms import BASELINE, DEFAULT_BUDGET, Arm, make_arms
from kvtool.evaluation.extras import require
from kvtool.evaluation.run.gates import Gate, check_gates, parse_least
from kvtool.evaluation.samples.sample import Json
from kvtool.evaluation.tasks.task import Task

if TYPE_CHECKING:
    from pathlib import Path

    from kvtool.cli.cache_estimate import Estimate
    from kvtool.cli.eval_options import EvalOptions
    from kvtool.evaluation.bench.protocol import Protocol
    from kvtool.evaluation.run.runner import Job


@dataclass(frozen=True)
class Plan:
    """A checked comparison.

    Attributes:
        recipe: everything resolved, so that the file alone repeats the run.
        pictures: their formats, None for the default.
        left_out: tasks of a suite that lack their data.
    """

    recipe: Recipe
    tasks: list[Task]
    arms: list[Arm]
    protocol: Protocol
    gates: list[Gate]
    pictures: tuple[str, ...] | None
    left_out: list[str]


def split_policies(texts: list[str]) -> list[str]:
    """Split at commas outside brackets.

    >>> split_policies(["h2o(recent=8,x=1)+caote,tova", "roco"])
    ['h2o(recent=8,x=1)+caote', 'tova', 'roco']
    """
    parts = [part.strip() for text in texts for part in re.split(r",(?![^(]*\))", text)]
    return [part for part in parts if part]


def _split(texts: list[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def read_plan(options: EvalOptions) -> Plan:
    """Put a recipe and the flags together.

    Raises:
        DocumentError, UsageError: every mistake that shows without the model.
    """

    def check(recipe: Recipe, source: Source) -> list[Problem]:
        return _problems(
            lambda: _policies(recipe, source), lambda: read_tasks(options, recipe, source)
        )

    recipe, source = resolve(options, _flags(options), "kvtool eval", check)
    policies = _policies(recipe, source)
    budgets = recipe.budgets()
    arms = make_arms(
        policies,
        budgets,
        prefill=recipe.prefill or "full",
        baseline=recipe.eval.baseline,
        plan=None if recipe.plan is None else PlanDocument(**recipe.plan),
    )
    tasks, left_out = read_tasks(options, recipe, source)
    gates = gates_of(options) + [
        Gate(gate.task, least=gate.min, max_drop=gate.max_drop) for gate in recipe.gates
    ]
    check_gates(gates, [(task.name, task.best, task.lower_is_better) for task in tasks])
    if any(gate.max_drop is not None for gate in gates) and not _has_baseline(arms):
        raise UsageError(
            "a largest drop is one from the full cache, which this run leaves out",
            hint="--baseline, or --fail-under TASK=V in place of --max-drop",
        )
    return Plan(
        recipe=_lock(recipe, tasks, policies, budgets),
        tasks=tasks,
        arms=arms,
        protocol=_protocol(recipe),
        gates=gates,
        pictures=pictures_of(options, recipe.output.plots),
        left_out=left_out,
    )


def _has_baseline(arms: list[Arm]) -> bool:
    return any(str(arm.policy) == BASELINE for arm in arms)


def _problems(*steps: Callable[[], Any]) -> list[Problem]:
    """Return what is wrong in a document; other mistakes wait until it is right."""
    found: list[Problem] = []
    for step in steps:
        try:
            step()
        except DocumentError as error:
            found += error.problems
        except UsageError:
            continue
    return found


def gates_of(options: EvalOptions) -> list[Gate]:
    """Return the gates that flags set."""
    gates = [parse_least(text) for text in options.fail_under]
    if options.max_drop is not None:
        gates.append(Gate("*", max_drop=options.max_drop))
    return gates


def pictures_of(options: EvalOptions, wanted: list[str] | None) -> tuple[str, ...] | None:
    """Return the formats of pictures, None for the default.

    Raises:
        UsageError: pictures are asked for and cannot be drawn.
    """
    if options.plots is False:
        return ()
    if options.plots or wanted:
        require("plots", needed_by="--plots")
    if wanted is not None:
        return tuple(wanted)
    return ("png", "svg") if options.plots else None


def _flags(options: EvalOptions) -> Flags:
    """Return what the flags set, in the form of a recipe."""
    flags = Flags(options)
    names = _given("--tasks", options.tasks, _split)
    flags.set("--tasks", [{"task": name} for name in names], "eval", "tasks")
    flags.set("--policy", _given("--policy", options.policy, split_policies), "policy")
    flags.set("--budget", _given("--budget", options.budget, _split), "budget")
    for name in ("baseline", "limit", "chat_template", "max_length", "truncate"):
        flags.take(options, name, "eval")
    if options.query_agnostic:
        flags.set("--query-agnostic", False, "eval", "query_aware")
    flags.take(options, "prefill")
    return flags


def _given(flag: str, texts: list[str], split: Callable[[list[str]], list[str]]) -> list[str]:
    """Return the parts of a flag's values, and refuse a flag without any."""
    parts = split(texts)
    if texts and not parts:
        raise UsageError(f"{flag} is empty")
    return parts


def _policies(recipe: Recipe, source: Source) -> list[str]:
    """Return the policies, those that evict with the allocator, if there is one."""
    from kvtool.policies.grammar import parse_policy

    if recipe.policy is None and not recipe.eval.baseline:
        raise UsageError("no policy to evaluate", hint="--policy streaming,h2o,h2o+caote")
    parsed = parse_policies(recipe, source, parse_policy)
    return [
        str(policy)
        if policy.score.when == "never"
        else with_allocator(str(policy), recipe.allocator)
        for policy in parsed
    ]


def _protocol(recipe: Recipe) -> Protocol:
    from kvtool.evaluation.bench.protocol import Protocol

    wanted, drawn = recipe.eval, recipe.generation
    return Protocol(
        query_aware=wanted.query_aware,
        chat_template=wanted.chat_template,
        max_length=wanted.max_length,
        truncate=wanted.truncate,
        max_new_tokens=drawn.max_new_tokens,
        temperature=drawn.temperature,
        stop=tuple(drawn.stop),
        seed=recipe.seed,
    )


def _lock(recipe: Recipe, tasks: list[Task], policies: list[str], budgets: list[str]) -> Recipe:
    """Return a recipe in which every task, setting, policy and budget is spelled out."""
    entries = [
        {"task": task.name, **task.model_dump(mode="json", exclude={"name"})} for task in tasks
    ]
    data = recipe.to_data()
    data["eval"]["tasks"] = entries
    data["policy"] = policies or None
    data["modifiers"] = []
    data["budget"] = {"plan": recipe.plan} if recipe.plan else budgets or [str(DEFAULT_BUDGET)]
    data["allocator"] = None
    return Recipe(**{key: value for key, value in data.items() if value is not None})


def describe(plan: Plan, jobs: list[Job], folder: Path, estimate: Estimate) -> Json:
    """Return what a dry run prints: the recipe, how much work it is, and bytes of K/V per arm.

    Raises:
        UsageError: a share of a prompt that the policy's protected tokens fill.
    """
    return {
        **plan.recipe.to_data(),
        "work": {
            "folder": str(folder),
            "arms": [arm.name for arm in plan.arms],
            "tasks": [
                {
                    "task": job.task.name,
                    "samples": len(job.samples),
                    **estimate.of(job.task, job.samples, plan.arms),
                }
                for job in jobs
            ],
            "measurements": len(plan.arms) * sum(len(job.samples) for job in jobs),
        },
    }
