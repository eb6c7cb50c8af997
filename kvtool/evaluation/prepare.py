"""A comparison with its samples drawn: all that can go wrong without weights has been looked at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtool.documents.memory import DeviceMemory
from kvtool.documents.plan import PlanDocument
from kvtool.documents.recipe import ModelChoice
from kvtool.errors import UsageError
from kvtool.evaluation.auto_budget import asks_device, with_budgets
from kvtool.evaluation.bench.estimate import Estimate, largest_batch_of
from kvtool.evaluation.comparison import Comparison, is_named, run_folder
from kvtool.evaluation.guarantee import check_guarantee
from kvtool.evaluation.pairs import variant_entry
from kvtool.evaluation.run.runner import Job, draw_jobs
from kvtool.evaluation.samples.questions import one_token_note
from kvtool.evaluation.samples.sample import Json, token_counter
from kvtool.evaluation.tasks.asking import Asking
from kvtool.evaluation.tasks.selection import hub_data
from kvtool.model_shape import stored_dtype, trained_length
from kvtool.models.attached import ModelSource
from kvtool.models.chat import make_frame
from kvtool.models.notes import handful_note, length_note
from kvtool.models.placement import (
    check_attention,
    memory_of,
    resolve_device,
    resolve_dtype,
)
from kvtool.planning.bytes import Text
from kvtool.planning.estimate import check_bytes
from kvtool.planning.plan_in_use import beyond_plan, check_free, check_plan, check_run, held_by_plan
from kvtool.sizes import DEFAULT_TOKENS, bytes_in_words
from kvtool.transformers_versions import check_transformers
from kvtool.watcher import Watcher


@dataclass(frozen=True)
class PlannedDevice:
    """The device that a run is planned for.

    Attributes:
        memory: its bytes; None: what is free.
        elsewhere: whether it is a GPU that need not be here.
        strict: whether to refuse a plan for more memory than is free.
    """

    memory: int | None = None
    elsewhere: bool = False
    strict: bool = False

    def check_plan(self, plan: PlanDocument, choice: ModelChoice) -> str | None:
        """Return a warning of a plan for more memory than is free, None where there is none.

        Raises:
            UsageError: that is so, and it was asked for to refuse it.
        """
        spread = bool(choice.device_map or choice.tensor_parallel)
        there = memory_of(self.name(choice), self.memory, spread=spread)
        return check_free(plan, *there, strict=self.strict)

    def name(self, choice: ModelChoice) -> str:
        """Name the device that a recipe's model runs on."""
        return resolve_device(choice.device, choice.device_map, elsewhere=self.elsewhere)

    def memory_for(
        self, choice: ModelChoice, model: ModelSource, estimate: Estimate
    ) -> DeviceMemory:
        """Return its memory, and what the weights of a model take of it."""
        return model.device_memory(
            estimate.config,
            estimate.dtype,
            self.name(choice),
            spread=bool(choice.device_map or choice.tensor_parallel),
            bits=choice.quantize,
            memory=self.memory,
        )


@dataclass(frozen=True)
class Prepared:
    """A comparison that is ready to be measured.

    Attributes:
        folder: of the run.
        jobs: every task with its samples.
        estimate: what prompts and caches will measure.
        model: where it comes from.
        named: whether the user has named the folder; else a new folder is made beside one that
            holds another run.
        device: that is planned for.
    """

    comparison: Comparison
    folder: Path
    jobs: list[Job]
    estimate: Estimate
    model: ModelSource
    named: bool = True
    device: PlannedDevice = PlannedDevice()

    @property
    def measurements(self) -> int:
        """How many there are: every sample under every variant."""
        return len(self.comparison.variants) * sum(len(job.samples) for job in self.jobs)

    def describe(self) -> Json:
        """Return the recipe, how much work it is, and the memory that each variant takes.

        Raises:
            UsageError: a ratio of a prompt that the policy's protected tokens fill.
        """
        variants, choice = self.comparison.variants, self.comparison.recipe.model
        memory = self.device.memory_for(choice, self.model, self.estimate)
        return {
            **self.comparison.recipe.to_data(),
            "work": {
                "folder": str(self.folder),
                "memory": memory,
                "variants": [variant.name for variant in variants],
                "tasks": [
                    {
                        "task": job.task.name,
                        "samples": len(job.samples),
                        **self.estimate.of(job.task, job.samples, variants, memory),
                    }
                    for job in self.jobs
                ],
                "measurements": self.measurements,
            },
        }


def memory_in_words(description: Json) -> list[str]:
    """Say of a described run what the most demanding variant needs, and each that does not fit."""
    work = description["work"]
    found = {
        f"{name} on {task['task']}": each
        for task in work["tasks"]
        for name, each in task.get("memory", {}).items()
    }
    if not found:
        return []
    most = max(found, key=lambda name: found[name].peak_bytes or 0)
    lines = [f"memory: {most}: {found[most].needed()}; {work['memory'].there()}"]
    missing = (found[most].peak_bytes or 0) - (work["memory"].free_bytes or 0)
    if found[most].fits is False:
        lines[0] += f"; {bytes_in_words(missing)} too much"
    others = (name for name, each in found.items() if each.fits is False and name != most)
    return lines + [f"memory: {name}: {found[name].needed()}" for name in others]


def prepare(
    comparison: Comparison,
    folder: str | None,
    source: ModelSource | None = None,
    *,
    watcher: Watcher,
    device: PlannedDevice | None = None,
    overwrite: bool = False,
) -> Prepared:
    """Check model, folder and budgets, and draw all samples, for which a tokenizer is enough.

    Args:
        folder: of the run; None: that of the recipe, or one under `runs/` named after the work.
        source: where the model comes from, and whether its code may run; the recipe names it and
            says how it is loaded.
        watcher: gets the notes that a person should read before it begins.
        device: that is planned for; None: the one of the recipe.
        overwrite: whether a budget of `auto` is chosen anew where the folder holds a run.

    Raises:
        UsageError, KvtoolError: the first of these that is wrong.
    """
    check_transformers()
    if comparison.left_out:
        watcher.note(f"left out, they need --data: {', '.join(comparison.left_out)}")
    sizes = [
        variant.budget.tokens
        for variant in comparison.variants
        if variant.budget and variant.budget.tokens
    ]
    if sizes:
        watcher.note_any(handful_note(min(sizes)))
    if comparison.protocol.shared_prefill:
        watcher.note("variants read a prompt together where they can, and share its seconds")
    note_answers(comparison, watcher)
    _note_batches(comparison, watcher)
    _note_key_bits(comparison, watcher)
    place = run_folder(comparison, folder)
    settings = comparison.recipe.model.model_dump(exclude={"id"})
    source = ModelSource(None) if source is None else source
    settings = {**source.settings, **settings}
    model = replace(source, name=comparison.recipe.model.id, settings=settings)
    device = device or PlannedDevice()
    dtype = _check_model(model, comparison.recipe.model, device)
    watcher.note_any(model.note())
    tokenizer, config = model.tokenizer()
    make_frame(tokenizer, comparison.protocol.template, chat=True)
    watcher.note_any(length_note(config, comparison.protocol.max_length or 0, 0))
    for name in hub_data(comparison.tasks):
        watcher.note(f"data: {name} (no such folder here, asking the hub)")
    check_bytes(config, dtype, comparison.variants)
    plan = comparison.variants[-1].plan if comparison.variants else None
    if plan is not None and model.loaded is None:
        watcher.note_any(device.check_plan(plan, comparison.recipe.model))
    _note_budgets(comparison, config, dtype, watcher)
    counter = token_counter(tokenizer, trained_length(config))
    jobs = draw_jobs(comparison.tasks, counter, comparison.recipe.eval.limit)
    if (loss := comparison.recipe.eval.guarantee) is not None:
        check_guarantee(loss, jobs, list(map(variant_entry, comparison.variants)))
    estimate = Estimate(tokenizer, config, dtype, comparison.protocol)
    for job in jobs:
        if job.task.knows_query(comparison.protocol):
            watcher.note_any(one_token_note(job.task.name, job.one_token))
    if asks_device(comparison):
        memory = device.memory_for(comparison.recipe.model, model, estimate)
        lock = None if overwrite else place
        comparison = with_budgets(comparison, jobs, estimate, memory, lock, watcher)
        check_bytes(config, dtype, comparison.variants)
    _note_samples(comparison, jobs, estimate, watcher)
    named = is_named(comparison, folder)
    return Prepared(comparison, place, jobs, estimate, model, named, device)


def note_answers(comparison: Comparison, watcher: Watcher) -> None:
    """Say which answers are decoded or fed token by token although they are to be scored.

    Raises:
        UsageError: none can be scored, or answers are to be drawn.
    """
    if comparison.protocol.answers != "scored":
        return
    if comparison.protocol.temperature:
        raise UsageError(
            "--answers scored compares with the likeliest tokens, and answers are to be drawn",
            hint="leave out the temperature, or --answers decoded",
        )
    asking = [task for task in comparison.tasks if isinstance(task, Asking)]
    decoded = [task.name for task in asking if not task.one_answer]
    if len(decoded) == len(asking):
        raise UsageError(
            "--answers scored: no task here has one right answer that can be fed",
            hint="niah, niah/passkey and niah/city have; or --answers decoded",
        )
    if decoded:
        watcher.note(f"answers are decoded, not scored, of {', '.join(decoded)}")
    steps = [each.name for each in comparison.variants if not each.policy.plain_steps]
    if steps:
        watcher.note(f"answers are scored token by token under {', '.join(steps)}")


def _note_batches(comparison: Comparison, watcher: Watcher) -> None:
    """Say which answers are decoded in batches."""
    sizes = {task.name: task.largest_batch(comparison.protocol) for task in comparison.tasks}
    tasks = [name for name in sizes if sizes[name] > 1]
    if tasks:
        watcher.note(
            f"up to {max(sizes.values())} answers to {', '.join(tasks)} are decoded in one batch, "
            "under policies whose texts can share one (--batch 1: one by one)"
        )


def _note_key_bits(comparison: Comparison, watcher: Watcher) -> None:
    """Say that keys of few bits cost reasoning, where a task asks for it."""
    policies = [each.policy for each in comparison.variants]
    coarse = [str(each) for each in policies if each.codec and each.codec.key_bits < 8]
    tasks = [task.name for task in comparison.tasks if task.reasons]
    if coarse and tasks:
        watcher.note(
            "note: keys of 4 bits cost reasoning: 1 to 4 points (vLLM), on AIME25 up to 40 "
            f"(SGLang); here {', '.join(dict.fromkeys(coarse))} on {', '.join(tasks)}; "
            "+k8v4 keeps 8 bits for keys"
        )


def _check_model(model: ModelSource, choice: ModelChoice, planned: PlannedDevice) -> str:
    """Refuse a model that cannot run here; return its dtype."""
    if model.loaded is not None:
        return model.dtype
    model.check()
    device = planned.name(choice)
    check_attention(choice.attn_implementation, device)
    return resolve_dtype(choice.dtype, device)


def _note_budgets(comparison: Comparison, config: Any, dtype: str, watcher: Watcher) -> None:
    """Say what bytes and plans mean for the policies, and refuse plans whose bytes are exceeded."""
    dtype = stored_dtype(config, dtype)
    if comparison.variants and comparison.variants[-1].plan is not None:
        check_plan(comparison.variants[-1].plan, config)
    for variant in comparison.variants:
        plan, policy = variant.plan, variant.policy
        for line in [] if plan is None else check_run(plan, policy, config, dtype):
            watcher.note(f"{variant.name}: {line.removeprefix('note: ')}")
        budget = variant.budget if plan is None else None
        if budget is not None and budget.bytes is not None and policy.stores_all:
            watcher.note(
                f"{variant.name}: bytes are for what is stored, which is everything; a token reads "
                f"{DEFAULT_TOKENS} pairs of key and value per layer and KV head"
            )


def _note_samples(
    comparison: Comparison, jobs: list[Job], estimate: Estimate, watcher: Watcher
) -> None:
    """Say where the longest sample holds more than the plan of a variant says."""
    planned = [
        (variant, variant.plan) for variant in comparison.variants if variant.plan is not None
    ]
    if not planned:
        return
    asked = [(job.task, sample) for job in jobs for sample in job.samples]
    prompt = max((estimate.prompt_tokens(*each) or 0 for each in asked), default=0)
    samples = [sample for _, sample in asked]
    text = Text(prompt, estimate.answer_tokens(samples), largest_batch_of(samples))
    for variant, plan in planned:
        held = held_by_plan(plan, variant.policy, estimate.config, estimate.dtype, text)
        excess = beyond_plan(plan, held, text)
        if excess is not None:
            watcher.note(f"{variant.name}: after a {excess}")
