"""`kvtool eval`: compare policies on benchmarks, in a folder that a broken-off run goes on in."""

from __future__ import annotations

import re
from contextlib import ExitStack, nullcontext
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.cli.eval_options import EvalOptions
from kvtool.cli.evaluation_end import exit_with, finish, rescore
from kvtool.cli.evaluation_measure import measure
from kvtool.cli.loading import note_model
from kvtool.cli.output import write_configuration
from kvtool.cli.prompt import note_handful, note_length
from kvtool.cli.terminal import Terminal
from kvtool.documents.files import check_name
from kvtool.errors import UsageError
from kvtool.models.folder import REFERENCE, check_folder
from kvtool.processes import joined
from kvtool.sizes import DEFAULT_TOKENS

if TYPE_CHECKING:
    from kvtool.cli.cache_estimate import Estimate
    from kvtool.cli.evaluation_plan import Plan
    from kvtool.evaluation.run.runner import Job
    from kvtool.evaluation.run.store import Store

_FILES = (".json", ".yaml", ".yml", ".txt")


def evaluate(options: EvalOptions, terminal: Terminal) -> None:
    """Compare policies under budgets on benchmarks, with the full cache beside them."""
    if options.rescore is not None:
        rescore(options, terminal)
        return
    from kvtool.cli.cache_estimate import Estimate, check_bytes
    from kvtool.cli.evaluation_plan import describe, read_plan
    from kvtool.cli.evaluation_tasks import hub_data

    plan = read_plan(options)
    if plan.left_out:
        terminal.note(f"left out, they need --data: {', '.join(plan.left_out)}")
    sizes = [arm.budget.tokens for arm in plan.arms if arm.budget and arm.budget.tokens]
    if sizes:
        note_handful(min(sizes), terminal)
    folder = _folder(options, plan)
    check_folder(plan.recipe.model.id)
    tokenizer, config, dtype = _read_model(options, plan, terminal)
    for name in hub_data(plan.tasks):
        terminal.note(f"data: {name} (no such folder here, asking the hub)")
    check_bytes(config, dtype, plan.arms)
    _note_budgets(plan, config, dtype, terminal)
    jobs = _draw(plan, tokenizer, config)
    estimate = Estimate(tokenizer, config, dtype, plan.protocol)
    _note_samples(plan, jobs, estimate, terminal)
    if options.dry_run:
        write_configuration(describe(plan, jobs, folder, estimate), options, terminal)
        return
    from kvtool.evaluation.run.store import Store

    with joined() as processes, ExitStack() as held:
        together = plan.recipe.model.tensor_parallel
        store = Store(folder, processes.rank, silent=together and not processes.first)
        processes.lead(lambda: _open(options, store, held))
        with nullcontext() if processes.first else store.locked():
            run = measure(options, plan, jobs, store, processes, terminal)
        processes.wait()
        results = processes.lead(lambda: finish(options, plan.pictures, run, terminal))
    exit_with(results)


def _folder(options: EvalOptions, plan: Plan) -> Path:
    """Return the folder of the run, once it is known that it can be one."""
    if options.output is not None and not options.output.strip():
        raise UsageError("--output is empty", hint="--output runs/NAME")
    given = plan.recipe.output.dir if options.output in (None, "-") else options.output
    if given is not None:
        folder = Path(given).expanduser()
    else:
        model = Path(plan.recipe.model.id or REFERENCE).name
        tasks = "+".join(dict.fromkeys(task.name.partition("/")[0] for task in plan.tasks))
        name = plan.recipe.name or f"{model}_{tasks}_{date.today()}"
        folder = Path("runs") / re.sub(r"[^A-Za-z0-9.+_-]", "_", name)
    check_name(folder, "--output")
    for arm in plan.arms:
        check_name(Path(arm.folder), "--policy")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output: `{folder}` is a file, a run needs a folder")
    if folder.suffix.lower() in _FILES and not folder.exists():
        raise UsageError(
            f"--output is the folder of a run, `{folder}` looks like a file",
            hint=f"--output {folder.with_suffix('')}; to save what is printed, redirect it with >",
        )
    return folder


def _read_model(options: EvalOptions, plan: Plan, terminal: Terminal) -> tuple[Any, Any, str]:
    """Return tokenizer, configuration and dtype, once it is known that they do what is wanted."""
    from kvtool.models.chat import make_frame
    from kvtool.models.load import load_tokenizer
    from kvtool.models.placement import check_attention, resolve_device, resolve_dtype

    model = plan.recipe.model
    device = resolve_device(model.device, model.device_map)
    check_attention(model.attn_implementation, device)
    note_model(model.id, terminal)
    tokenizer, config = load_tokenizer(
        model.id, revision=model.revision, trust_remote_code=options.trust_remote_code
    )
    make_frame(tokenizer, plan.protocol.chat_template, chat=True)
    note_length(config, plan.protocol.max_length or 0, 0, terminal)
    return tokenizer, config, resolve_dtype(model.dtype, device)


def _note_budgets(plan: Plan, config: Any, dtype: str, terminal: Terminal) -> None:
    """Say what bytes and plans mean for the policies, and refuse plans whose bytes are exceeded."""
    from kvtool.evaluation.bench.arms import plan_of
    from kvtool.planning.held import DEFAULT_TRAFFIC
    from kvtool.planning.run import check_run

    dtype = stored_dtype(config, dtype)
    for arm in plan.arms:
        planned = plan_of(arm)
        for line in [] if planned is None else check_run(planned, arm.policy, dtype):
            terminal.note(f"{arm.name}: {line.removeprefix('note: ')}")
        by_bytes = planned is None and arm.budget is not None and arm.budget.bytes is not None
        if by_bytes and arm.policy.stores_all:
            terminal.note(
                f"{arm.name}: bytes are for what is stored, which is everything; a token reads "
                f"{DEFAULT_TOKENS} pairs of key and value per layer and KV head"
            )


def _note_samples(plan: Plan, jobs: list[Job], estimate: Estimate, terminal: Terminal) -> None:
    """Say where the longest sample holds more than the plan of an arm says."""
    from kvtool.evaluation.bench.arms import plan_of
    from kvtool.planning.run import beyond_plan, use_plan

    planned = {arm.name: (arm, plan_of(arm)) for arm in plan.arms if arm.plan is not None}
    if not planned:
        return
    samples = [(job.task, sample) for job in jobs for sample in job.samples]
    prompt = max((estimate.prompt_tokens(*each) or 0 for each in samples), default=0)
    fixed = plan.protocol.max_new_tokens
    answers = [[fixed or turn.max_new_tokens for turn in each.turns] for _, each in samples]
    new = max(map(sum, answers), default=0)
    rows = max((int(sample.cell.get("batch", 1)) for _, sample in samples), default=1)
    for name, (arm, document) in planned.items():
        used = use_plan(
            document, arm.policy, prompt=prompt, new=new, rows=rows, dtype=estimate.dtype
        )
        told = beyond_plan(document, used, prompt, new)
        if told is not None:
            terminal.note(f"{name}: after a {told}")


def _draw(plan: Plan, tokenizer: Any, config: Any) -> list[Job]:
    """Draw all samples, for which the tokenizer is enough: bad data show before weights load."""
    from kvtool.evaluation.run.runner import draw_jobs
    from kvtool.evaluation.samples.sample import token_counter
    from kvtool.models.length import trained_length

    counter = token_counter(tokenizer, trained_length(config))
    return draw_jobs(plan.tasks, counter, plan.recipe.eval.limit)


def _open(options: EvalOptions, store: Store, held: ExitStack) -> None:
    """Take hold of a run's folder, refuse another one, empty one that is to be overwritten."""
    from kvtool.evaluation.run.run import RECIPE, read_results

    held.enter_context(store.locked())
    if store.is_empty():
        store.sweep()
        return
    if not (store.folder / RECIPE).is_file():
        raise UsageError(
            f"folder `{store.folder}` holds other files, no run (no {RECIPE})",
            hint="choose a new folder with --output",
        )
    store.sweep()
    if options.overwrite:
        store.clear()
    read_results(store)
    store.mend()
