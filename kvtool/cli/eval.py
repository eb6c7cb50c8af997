"""`kvtool eval`: compare policies on benchmarks, in a folder that a broken-off run goes on in."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtool.calls.eval_settings import EvalSettings
from kvtool.cli.eval_end import EvalWatcher, check_pictures, exit_with, rescore_run
from kvtool.cli.output import write_configuration
from kvtool.cli.terminal import Terminal
from kvtool.errors import UsageError

if TYPE_CHECKING:
    from kvtool.documents.results import ResultsDocument
    from kvtool.evaluation.comparison import Comparison
    from kvtool.evaluation.prepare import Prepared
    from kvtool.evaluation.run.gates import Gate
    from kvtool.watcher import Watcher


def evaluate(options: EvalSettings, terminal: Terminal) -> None:
    """Compare policies under budgets on benchmarks, with the full cache beside them."""
    if options.rescore is not None:
        rescore_run(options, split_policies(options.policy), gates_of(options), terminal)
        return
    comparison = _read(options)
    if options.format == "csv":
        from kvtool.report.leaderboard import check_board

        check_board(task.name for task in comparison.tasks)
    pictures = check_pictures(options, comparison.recipe.output.plots)
    watcher = EvalWatcher(options, terminal, pictures)
    if options.dry_run:
        _describe(comparison, options, watcher, terminal)
        return
    prepared = _prepare(comparison, options, watcher)
    exit_with(_run(prepared, options, watcher))


def _describe(
    comparison: Comparison, options: EvalSettings, watcher: Watcher, terminal: Terminal
) -> None:
    """Print what would be run; without the hub, what is known without it."""
    from kvtool.evaluation.outline import outline

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
    from kvtool.calls.evaluate import compare
    from kvtool.documents.source import read_source
    from kvtool.evaluation.tasks.selection import parse_data

    path = options.recipe
    return compare(
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
    from kvtool.evaluation.prepare import prepare

    return prepare(comparison, options.output, options.source(), watcher=watcher)


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
