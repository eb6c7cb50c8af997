"""The middle of `kvtool eval`: the model is loaded, and what is missing is measured."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvtool.cli.loading import load_attached
from kvtool.cli.progress import show_progress
from kvtool.cli.terminal import Terminal

if TYPE_CHECKING:
    from kvtool.cli.eval_options import EvalOptions
    from kvtool.cli.evaluation_plan import Plan
    from kvtool.evaluation.run.run import Run
    from kvtool.evaluation.run.runner import Job, Step
    from kvtool.evaluation.run.store import Store
    from kvtool.processes import Processes


def measure(
    options: EvalOptions,
    plan: Plan,
    jobs: list[Job],
    store: Store,
    processes: Processes,
    terminal: Terminal,
) -> Run:
    """Load the model and measure this process's share of what is missing."""
    from kvtool.evaluation.run.environment import without_home
    from kvtool.evaluation.run.partition import share_of
    from kvtool.evaluation.run.run import RECIPE, Run

    store.write(RECIPE, plan.recipe.to_yaml())
    model = plan.recipe.model
    loaded = load_attached(
        model.id, model.model_dump(exclude={"id"}), options.trust_remote_code, terminal
    )
    run = Run.begin(
        store,
        name=plan.recipe.name or store.folder.name,
        argv=[without_home(argument) for argument in ["kvtool", *sys.argv[1:]]],
        loaded=loaded,
        arms=plan.arms,
        jobs=jobs,
        protocol=plan.protocol,
        gates=plan.gates,
    )
    model_of_all, left = processes.lead(lambda: (run.index.model, run.unfinished(jobs)))
    share = left
    if not model.tensor_parallel:
        run.check_same(model_of_all)
        share = share_of(left, processes.rank, processes.count)
    total = len(plan.arms) * sum(len(job.samples) for job in jobs)
    if len(left) < total:
        terminal.note(f"resumed {total - len(left)}/{total} in {store.folder}")
    if len(share) < len(left):
        terminal.note(
            f"{processes.count} processes share {len(left)} measurements, {len(share)} of them here"
        )
    told: set[tuple[str, str, str]] = set()
    with show_progress(terminal, len(share)) as advance:

        def step(done: Step) -> None:
            if done.error is not None and (what := (done.task, done.arm, done.error)) not in told:
                told.add(what)
                terminal.note(f"failed: {done.task}, {done.arm}: {done.error}")
            advance(f"{done.task} {done.arm}")

        try:
            run.measure(share, jobs, loaded, step, stop_on_error=not options.continue_on_error)
        except KeyboardInterrupt:
            terminal.note(
                f"interrupted; {store.folder} keeps what is done, the same command goes on"
            )
            raise
    return run
