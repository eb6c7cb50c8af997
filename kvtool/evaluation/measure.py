"""A prepared comparison measured in its folder: what is missing is run, and results are written."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from itertools import count
from pathlib import Path

from kvtool.documents.results import ResultsDocument
from kvtool.errors import UsageError
from kvtool.evaluation.prepare import Prepared
from kvtool.evaluation.run.environment import without_home
from kvtool.evaluation.run.gates import Gate
from kvtool.evaluation.run.index import RECIPE, partition_of, read_results
from kvtool.evaluation.run.run import Run
from kvtool.evaluation.run.runner import Job, Measurement, Step
from kvtool.evaluation.run.store import Store
from kvtool.models.load import Loaded
from kvtool.processes import Processes, joined
from kvtool.watcher import Watcher

_MOST = 20  # lines of a quick run
_WAIT = 60.0  # seconds after which a line comes anyway


def run_prepared(
    prepared: Prepared,
    watcher: Watcher,
    *,
    overwrite: bool = False,
    stop_on_error: bool = False,
    argv: Sequence[str] | None = None,
) -> ResultsDocument:
    """Measure what is missing of a run, and write its results; processes share the work.

    Args:
        overwrite: whether what the folder holds is deleted first.
        stop_on_error: whether a failing sample ends the run.
        argv: the command, for the results; None: that of this process.

    Raises:
        UsageError: the folder holds something else, or another run is writing to it.
        KvtoolError: a sample failed and `stop_on_error` is set.
    """
    tensor_parallel = prepared.comparison.recipe.model.tensor_parallel
    argv = sys.argv if argv is None else argv
    with joined() as processes, ExitStack() as held:
        silent = tensor_parallel and not processes.first
        store = Store(prepared.folder, processes.rank, silent=silent)
        processes.lead(lambda: _open(store, held, overwrite))
        if processes.first:
            watcher.note(work_in_words(prepared.jobs, len(prepared.comparison.variants)))
        with prepared.model.attached(note=watcher.note, progress=watcher.shows_progress) as loaded:
            chosen: list[Run] = []  # by the first process, which sends the folder to the others

            def choose() -> Path:
                chosen.append(_choose(prepared, store, held, loaded, watcher, argv))
                return chosen[0].store.folder

            folder = processes.lead(choose)
            if processes.first:
                run = chosen[0]
            else:
                run = _plan(prepared, Store(folder, store.process, silent=silent), loaded, argv)
            with nullcontext() if processes.first else run.store.locked():
                run.store.write(RECIPE, prepared.comparison.recipe.to_yaml())
                run.start()
                _measure_missing(run, prepared, loaded, processes, watcher, stop_on_error)
        processes.wait()
        return processes.lead(lambda: finish(run, watcher))


def finish(run: Run, watcher: Watcher) -> ResultsDocument:
    """Write the results of a run, and show them."""
    run.store.repair()
    results = run.write_results()
    watcher.show_results(results, run.store.folder)
    return results


def rescore(
    folder: Path,
    gates: Sequence[Gate],
    watcher: Watcher,
    *,
    within: float | None = None,
    pairs: Sequence[str] | None = None,
) -> ResultsDocument:
    """Score the stored answers of a run anew.

    Args:
        gates, within, pairs: in place of those of the run, if they are given.

    Raises:
        UsageError: the folder holds no run.
    """

    def score() -> ResultsDocument:
        store = Store(folder)
        with store.locked():
            return finish(Run.open(store, gates or None, within, pairs), watcher)

    with joined() as processes:
        return processes.lead(score)


def _open(store: Store, held: ExitStack, overwrite: bool) -> None:
    """Take hold of a run's folder, refuse another one, empty one that is to be overwritten."""
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
    if overwrite:
        store.clear()
    read_results(store)
    store.repair()


def _choose(
    prepared: Prepared,
    store: Store,
    held: ExitStack,
    loaded: Loaded,
    watcher: Watcher,
    argv: Sequence[str],
) -> Run:
    """Return the run in a folder that it can go on in: its own, or a new one beside it.

    Only the same command with the same inputs goes on in a folder that the user has not named.
    """
    run = _plan(prepared, store, loaded, argv)
    for number in count(2):
        there = run.look_at_records(prepared.jobs)
        if there.stale is not None and prepared.named:
            raise there.stale
        if there.stale is None and (prepared.named or _same_recipe(prepared, run.store)):
            break
        folder = prepared.folder.with_name(f"{prepared.folder.name}_{number}")
        store = Store(folder, store.process, silent=store.silent)
        _open(store, held, overwrite=False)
        run = _plan(prepared, store, loaded, argv)
    if run.store.folder != prepared.folder:
        watcher.note(f"{prepared.folder} holds another run; this one is in {run.store.folder}")
    if there.unknown:
        watcher.note(
            f"{there.unknown} answers in {run.store.folder} are an earlier kvtool's and do not say "
            "by what code they were given; --overwrite measures them anew"
        )
    if run.index.guarantee is not None and not _same_recipe(prepared, run.store):
        raise UsageError(
            f"`{run.store.folder}` holds a run of another recipe; chosen afterwards: no guarantee",
            hint="another --output, and another --seed if you have seen its answers",
        )
    return run


def _same_recipe(prepared: Prepared, store: Store) -> bool:
    """Return whether a folder holds a run of the same recipe, or none."""
    path = store.folder / RECIPE
    return not path.is_file() or path.read_text("utf-8") == prepared.comparison.recipe.to_yaml()


def _plan(prepared: Prepared, store: Store, loaded: Loaded, argv: Sequence[str]) -> Run:
    comparison = prepared.comparison
    return Run.plan(
        store,
        name=comparison.recipe.name or store.folder.name,
        argv=[without_home(argument) for argument in argv],
        loaded=loaded,
        variants=comparison.variants,
        jobs=prepared.jobs,
        protocol=comparison.protocol,
        gates=comparison.gates,
        within=comparison.recipe.eval.within,
        guarantee=comparison.recipe.eval.guarantee,
        pairs=comparison.recipe.eval.compare,
        claim=comparison.recipe.claim,
    )


def _measure_missing(
    run: Run,
    prepared: Prepared,
    loaded: Loaded,
    processes: Processes,
    watcher: Watcher,
    stop_on_error: bool,
) -> None:
    jobs, folder = prepared.jobs, run.store.folder
    model_of_all, left = processes.lead(lambda: (run.index.model, run.unfinished(jobs)))
    part = left
    if not prepared.comparison.recipe.model.tensor_parallel:
        run.check_same(model_of_all)
        part = partition_of(left, processes.rank, processes.count)
    total = prepared.measurements
    if len(left) < total:
        watcher.note(f"resumed {total - len(left)}/{total} in {folder}")
    if len(part) < len(left):
        watcher.note(
            f"{processes.count} processes share {len(left)} measurements, {len(part)} of them here"
        )
    noted: set[tuple[str, str, str]] = set()
    lines = ProgressLines(part, jobs, watcher.note)
    with watcher.progress(len(part)) as advance:

        def step(done: Step) -> None:
            if (
                done.error is not None
                and (what := (done.task, done.variant, done.error)) not in noted
            ):
                noted.add(what)
                watcher.note(f"failed: {done.task}, {done.variant}: {done.error}")
            advance(f"{done.task} {done.variant}")
            if not watcher.shows_progress:
                lines.step(done)

        try:
            run.measure(part, jobs, loaded, step, stop_on_error=stop_on_error)
        except KeyboardInterrupt:
            watcher.note(f"interrupted; {folder} keeps what is done, the same command goes on")
            raise


def work_in_words(jobs: Sequence[Job], variants: int) -> str:
    """Say how many measurements a run is.

    >>> work_in_words([], 3)
    '0 samples x 3 variants = 0 measurements'
    """
    samples = sum(len(job.samples) for job in jobs)
    parts = f"{samples} samples"
    if len(jobs) == 1:
        cells = len({tuple(sample.cell.items()) for sample in jobs[0].samples})
        if cells > 1 and samples % cells == 0:
            parts = f"{cells} cells x {samples // cells} samples"
    return f"{parts} x {variants} variants = {samples * variants:,} measurements"


class ProgressLines:
    """Says after a measurement how far a run is, if a line is called for.

    Args:
        part: the measurements.
        say: takes a line.
        clock: seconds.
    """

    def __init__(
        self,
        part: Sequence[Measurement],
        jobs: Sequence[Job],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._clock, self._total = say, clock, len(part)
        self._cells: dict[tuple[str, str], str] = {}
        self._left = Counter[str]()
        for each in part:
            task, sample = jobs[each.job].task.name, jobs[each.job].samples[each.sample]
            cell = " ".join([task, *(f"{name}={value}" for name, value in sample.cell.items())])
            self._cells[task, sample.id] = cell
            self._left[cell] += 1
        self._done = self._said = 0
        self._at = clock()

    def step(self, done: Step) -> None:
        """Take note of one more measurement."""
        self._done += 1
        cell, total = self._cells[done.task, done.sample], self._total
        self._left[cell] -= 1
        ends = not self._left[cell]
        many = (self._done - self._said) * _MOST >= total
        if (ends and many) or self._done == total or self._clock() - self._at >= _WAIT:
            self._say(f"measured {self._done}/{total}: {cell}{'' if ends else ', not finished'}")
            self._said, self._at = self._done, self._clock()
