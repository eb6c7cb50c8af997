"""`kvtool eval`: compare policies on benchmarks, in a folder that a broken-off run goes on in.

It ends with results, pictures, page and tables, and an exit code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Exit

from kvtool.calls.eval_settings import EvalSettings
from kvtool.cli.output import write_configuration
from kvtool.cli.terminal import Terminal, TerminalWatcher
from kvtool.errors import KvtoolError
from kvtool.extras import installed, require

if TYPE_CHECKING:
    from kvtool.calls.evaluate import EvalRun
    from kvtool.documents.results import GateResult, ResultsDocument
    from kvtool.evaluation.comparison import Comparison


_GATE_FAILED, _SAMPLES_FAILED = 3, 4


class EvalWatcher(TerminalWatcher):
    """Shows a run on the terminal: notes, progress, and in the end results, pictures and page.

    Args:
        pictures: their formats, None for the default.
    """

    def __init__(
        self, options: EvalSettings, terminal: Terminal, pictures: tuple[str, ...] | None
    ) -> None:
        super().__init__(terminal)
        self.options, self._pictures = options, pictures

    def show_results(self, results: ResultsDocument, folder: Path) -> None:
        """Draw pictures and page, print the tables, and say what went wrong."""
        from kvtool.evaluation.run.wrong import wrong_answers
        from kvtool.report.page import write_page

        options, terminal = self.options, self.terminal
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


def _check_pictures(options: EvalSettings, wanted: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the formats of pictures, None for the default."""
    if options.plots is False:
        return ()
    if options.plots or wanted:
        require("plots", needed_by="--plots")
    if wanted is not None:
        return tuple(wanted)
    return ("png", "svg") if options.plots else None


def _exit_with(results: ResultsDocument) -> None:
    """End with the code that says what went wrong, if something did."""
    if not results.complete:
        raise KvtoolError(
            "the run is not complete: samples are missing in its folder",
            hint="the same command without --rescore and --overwrite measures them",
        )
    if any(not gate.passed for gate in results.gates):
        raise Exit(_GATE_FAILED)
    if any(result.failed for result in results.results):
        raise Exit(_SAMPLES_FAILED)


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
    from kvtool.calls.evaluate import read_run, rescore_run

    if options.rescore is not None:
        watcher = EvalWatcher(options, terminal, _check_pictures(options, None))
        _exit_with(rescore_run(options, watcher))
        return
    run = read_run(options)
    watcher = EvalWatcher(options, terminal, _check_forms(options, run.comparison))
    if options.dry_run:
        _describe(run, watcher)
        return
    terminal.loading(run.comparison.recipe.model.id)
    _exit_with(run.run(watcher, ["kvtool", *sys.argv[1:]]))


def _check_forms(options: EvalSettings, comparison: Comparison) -> tuple[str, ...] | None:
    """Refuse results in a form that they cannot have, and return the formats of pictures."""
    if options.format == "board":
        from kvtool.report.results_text import check_board

        check_board(task.name for task in comparison.tasks)
    return _check_pictures(options, comparison.recipe.output.plots)


def _describe(run: EvalRun, watcher: EvalWatcher) -> None:
    description, lines = run.describe(watcher)
    write_configuration(description, watcher.options, watcher.terminal)
    for line in lines:
        watcher.note(line)
