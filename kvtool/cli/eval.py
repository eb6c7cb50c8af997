"""`kvtool eval`: compare policies on benchmarks, in a folder that a broken-off run goes on in.

It ends with results, pictures, page and tables, and an exit code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Exit

from kvtool.calls.base_settings import RecipeSettings
from kvtool.calls.eval_settings import EvalSettings
from kvtool.cli.options import in_order
from kvtool.cli.output import write_configuration
from kvtool.cli.terminal import Terminal, TerminalWatcher
from kvtool.documents.files import expand
from kvtool.errors import KvtoolError, UsageError
from kvtool.extras import installed, require
from kvtool.policies.grammar import parse_policy
from kvtool.policies.installed import placed
from kvtool.policies.outside import module_of

if TYPE_CHECKING:
    from kvtool.documents.results import GateResult, ResultsDocument
    from kvtool.evaluation.comparison import Comparison
    from kvtool.evaluation.prepare import Prepared
    from kvtool.evaluation.run.gates import Gate
    from kvtool.watcher import Watcher


_GATE_FAILED, _SAMPLES_FAILED = 3, 4
_FOR_RESCORE = frozenset(
    {"rescore", "policy", "tasks", "fail_under", "max_drop", "within", "compare"}
    | {"plots", "format", "quiet", "progress", "debug"}
)


class EvalWatcher(TerminalWatcher):
    """Shows a run on the terminal: notes, progress, and in the end results, pictures and page.

    Args:
        pictures: their formats, None for the default.
    """

    def __init__(
        self, options: EvalSettings, terminal: Terminal, pictures: tuple[str, ...] | None
    ) -> None:
        super().__init__(terminal)
        self._options, self._pictures = options, pictures

    def show_results(self, results: ResultsDocument, folder: Path) -> None:
        """Draw pictures and page, print the tables, and say what went wrong."""
        from kvtool.evaluation.run.wrong import wrong_answers
        from kvtool.report.page import write_page

        options, terminal = self._options, self.terminal
        pictures = self._pictures
        if pictures is None:
            pictures = ("png", "svg") if installed("plots") else ()
        if pictures:
            from kvtool.report.pictures import draw

            (folder / "plots").mkdir(exist_ok=True)
            draw(results, folder / "plots", formats=pictures)
        write_page(results, folder / "report.html", wrong_answers(folder, results))
        form = options.choose_format("text" if terminal.interactive else "json")
        if options.format == "board":
            from kvtool.report.results_text import board_csv

            terminal.write(board_csv(results))
        elif options.format in ("csv", "latex", "markdown"):
            terminal.write(results.table(form=options.format))
        elif form == "text":
            from kvtool.report.results_text import results_tables

            terminal.print(results_tables(results))
        else:
            terminal.write(results.to_json() if form == "json" else results.to_yaml())
            from kvtool.report.words import verdict_lines

            for line in verdict_lines(results):
                terminal.note(line)
        terminal.note(f"wrote {folder}/results.json and {folder}/report.html")
        _tell_failures(results, folder, terminal)


def check_pictures(options: EvalSettings, wanted: Sequence[str] | None) -> tuple[str, ...] | None:
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


def exit_with(results: ResultsDocument) -> None:
    """End with the code that says what went wrong, if something did.

    Raises:
        KvtoolError: measurements are missing.
    """
    if not results.complete:
        raise KvtoolError(
            "the run is not complete: samples are missing in its folder",
            hint="the same command without --rescore and --overwrite measures them",
        )
    if any(not gate.passed for gate in results.gates):
        raise Exit(_GATE_FAILED)
    if any(result.failed for result in results.results):
        raise Exit(_SAMPLES_FAILED)


def rescore_run(
    options: EvalSettings, policies: Sequence[str], gates: Sequence[Gate], terminal: Terminal
) -> None:
    """Score the stored answers of a run anew.

    Args:
        policies: from outside the package, which the run may name.

    Raises:
        UsageError: no run there, flags that say what to run.
    """
    folder = expand(options.rescore or "")
    if not options.rescore or not folder.is_dir():
        raise UsageError(f"--rescore: no folder `{options.rescore}`")
    _refuse_others(options)
    _import_policies(policies)
    _import_tasks(_split(options.tasks))
    from kvtool.evaluation.measure import rescore

    watcher = EvalWatcher(options, terminal, check_pictures(options, None))
    exit_with(rescore(folder, gates, watcher, within=options.within, pairs=options.compare or None))


def _import_policies(policies: Sequence[str]) -> None:
    """Import the policies from outside the package that `-p` names: a run's folder never does.

    Raises:
        UsageError: one that is in the package, which needs no naming.
    """
    for text in policies:
        if module_of(placed(text)) is None:
            raise UsageError("--rescore takes a run as it is; leave out --policy")
        parse_policy(text)


def _import_tasks(tasks: Sequence[str]) -> None:
    """Import the tasks from outside the package that `-t` names: a run's folder never does."""
    from kvtool.evaluation.tasks.table import task_class

    for name in tasks:
        task_class(name, imports=True)


def _refuse_others(options: EvalSettings) -> None:
    """Refuse flags that a run's own files answer already."""
    plain = type(options)(rescore=options.rescore)
    shared = {each.name for each in fields(RecipeSettings)}
    inside = any(":" not in each for each in _split(options.tasks))
    own = _FOR_RESCORE - ({"tasks"} if inside else set())
    names = [each.name for each in in_order(type(options)) if each.name not in own]
    given = [
        "the recipe" if name == "recipe" else f"--{name.replace('_', '-')}"
        for name in sorted(names, key=lambda name: name not in shared)
        if getattr(options, name) != getattr(plain, name)
    ]
    if given:
        raise UsageError(f"--rescore takes a run as it is; leave out {', '.join(given)}")


def _tell_failures(results: ResultsDocument, folder: Path, terminal: Terminal) -> None:
    """Say why the exit code will not be 0."""
    for gate in results.gates:
        if not gate.passed:
            terminal.note(f"gate failed: {_tell(gate)}")
    failed = sum(result.failed for result in results.results)
    if failed:
        terminal.note(f"failed samples: {failed}; `error` in {folder}/samples says why")


def _tell(gate: GateResult) -> str:
    value = "no score" if gate.value is None else f"{gate.value:.4g}"
    if gate.gate == "least":
        return f"{gate.task}, {gate.variant}: {value}, the limit is {gate.limit:g}"
    if gate.value is None:
        return f"{gate.task}, {gate.variant}: no score to compare with the full cache's"
    return f"{gate.task}, {gate.variant}: {value} % worse than full, the limit is {gate.limit:g} %"


def evaluate(options: EvalSettings, terminal: Terminal) -> None:
    """Compare policies under budgets on benchmarks, with the full cache beside them."""
    if options.rescore is not None:
        rescore_run(options, split_policies(options.policy), gates_of(options), terminal)
        return
    comparison = _read(options)
    if options.format == "board":
        from kvtool.report.results_text import check_board

        check_board(task.name for task in comparison.tasks)
    pictures = check_pictures(options, comparison.recipe.output.plots)
    watcher = EvalWatcher(options, terminal, pictures)
    if options.dry_run:
        _describe(comparison, options, watcher, terminal)
        return
    terminal.loading(comparison.recipe.model.id)
    exit_with(_run(_prepare(comparison, options, watcher), options, watcher))


def _describe(
    comparison: Comparison, options: EvalSettings, watcher: Watcher, terminal: Terminal
) -> None:
    """Print what would be run; without the hub, what is known without it."""
    from kvtool.evaluation.comparison import outline

    outlined = outline(comparison, options.output)
    if outlined is not None:
        write_configuration(outlined.describe(), options, terminal)
        terminal.note(outlined.missing)
        return
    from kvtool.evaluation.prepare import memory_in_words

    description = _prepare(comparison, options, watcher).describe()
    write_configuration(description, options, terminal)
    for line in memory_in_words(description):
        terminal.note(line)


def _read(options: EvalSettings) -> Comparison:
    """Return what is compared, by the recipe and the flags over it."""
    from kvtool.calls.evaluate import compared
    from kvtool.documents.source import read_source
    from kvtool.evaluation.tasks.selection import parse_data

    path = options.recipe
    return compared(
        options,
        read_source(path, option="recipe or plan") if isinstance(path, str) else path,
        tasks=_given("--tasks", options.tasks, _split),
        policies=_given("--policy", options.policy, split_policies),
        budgets=_given("--budget", options.budget, _split),
        data=parse_data(options.data),
        gates=_least(options),
        command="kvtool eval",
    )


def _prepare(comparison: Comparison, options: EvalSettings, watcher: Watcher) -> Prepared:
    from kvtool.calls.evaluate import planned_device
    from kvtool.evaluation.prepare import prepare

    return prepare(
        comparison,
        options.output,
        options.source(),
        watcher=watcher,
        device=planned_device(options, comparison),
        overwrite=options.overwrite,
    )


def _run(prepared: Prepared, options: EvalSettings, watcher: Watcher) -> ResultsDocument:
    from kvtool.evaluation.measure import run_prepared

    return run_prepared(
        prepared,
        watcher,
        overwrite=options.overwrite,
        stop_on_error=not options.continue_on_error,
        argv=["kvtool", *sys.argv[1:]],
    )


def _least(options: EvalSettings) -> list[Gate]:
    from kvtool.evaluation.run.gates import parse_least

    return [parse_least(text) for text in options.fail_under]


def gates_of(options: EvalSettings) -> list[Gate]:
    """Return the gates that flags set."""
    return [*_least(options), *options.gates()]


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
