"""Turn budgets of `auto` into bytes that hold for a whole comparison, or keep those of its run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvtool.documents.memory import DeviceMemory
from kvtool.documents.recipe import Recipe
from kvtool.documents.source import read_file
from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.bench.estimate import Estimate, largest_batch_of
from kvtool.evaluation.comparison import Comparison
from kvtool.evaluation.run.index import RECIPE
from kvtool.evaluation.run.runner import Job
from kvtool.planning.bytes import Text
from kvtool.planning.fit import Run, choose_bytes, chosen_note
from kvtool.sizes import Budget
from kvtool.watcher import Watcher


def asks_device(comparison: Comparison) -> bool:
    """Say whether a budget is `auto`, which a device's memory gives."""
    return any(each.budget and each.budget.share is not None for each in comparison.variants)


def with_budgets(
    comparison: Comparison,
    jobs: Sequence[Job],
    estimate: Estimate,
    memory: DeviceMemory,
    folder: Path | None,
    watcher: Watcher,
) -> Comparison:
    """Return a comparison whose budgets in bytes take the place of `auto`, and say them.

    Every variant gets the same bytes, those that the most demanding task leaves.

    Args:
        folder: of a run that may have been begun, which keeps its budgets; None: of none.

    Raises:
        UsageError: nothing is left of the memory, or what the tasks take is not known.
    """
    if comparison.protocol.shared_prefill:
        raise UsageError(
            "-b auto counts with one cache at a time, and --shared-prefill holds several",
            hint="-b SIZE, or leave out --shared-prefill",
        )
    begun = {} if folder is None else _begun(comparison, folder)
    chosen: dict[Budget | None, Budget] = {}
    for budget in comparison.recipe.budgets():
        if budget.share is None:
            continue
        runs = _runs(comparison, budget, jobs, estimate, memory.device)
        if budget in begun:
            chosen[budget] = begun[budget]
            watcher.note(f"budget: {begun[budget]}, as the run in {folder} has it")
        elif runs:
            chosen[budget] = choose_bytes(runs, budget, memory)
            watcher.note(chosen_note(chosen[budget], budget, memory, runs))
        else:
            raise UsageError(f"-b {budget}: the lengths of prompts are not known", hint="-b SIZE")
    sizes = [str(chosen.get(each, each)) for each in comparison.recipe.budgets()]
    variants = [
        replace(each, budget=chosen.get(each.budget, each.budget)) for each in comparison.variants
    ]
    recipe = comparison.recipe.model_copy(update={"budget": sizes})
    return replace(comparison, recipe=recipe, variants=variants)


def _begun(comparison: Comparison, folder: Path) -> dict[Budget, Budget]:
    """Return the bytes of a run that was begun, by the budgets that they stand for.

    Empty where the folder holds no run, or one with other budgets.
    """
    if not (folder / RECIPE).is_file():
        return {}
    try:
        there = read_file(folder / RECIPE, option="lock file").validate(Recipe).budgets()
    except KvtoolError:
        return {}
    asked = comparison.recipe.budgets()
    if len(there) != len(asked):
        return {}
    pairs = list(zip(asked, there, strict=True))
    if any(each != own and (each.share is None or own.bytes is None) for each, own in pairs):
        return {}
    return {each: own for each, own in pairs if each.share is not None}


def _runs(
    comparison: Comparison,
    budget: Budget,
    jobs: Sequence[Job],
    estimate: Estimate,
    device: str,
) -> list[Run]:
    """Return the run of each variant under a budget on the longest prompt of each task."""
    config, found = estimate.config, []
    vocabulary = config.get_text_config(decoder=True).vocab_size
    for job in jobs:
        lengths = [estimate.prompt_tokens(job.task, sample) for sample in job.samples]
        longest = max((each for each in lengths if each is not None), default=0)
        if not longest:
            continue
        rows, new = largest_batch_of(job.samples), estimate.answer_tokens(job.samples)
        text = Text(longest, new, rows, vocabulary)
        found += [
            Run(config, estimate.dtype, variant, text, {}, device=device)
            for variant in comparison.variants
            if variant.budget == budget
        ]
    return found
