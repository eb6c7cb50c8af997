"""`kvtool eval`: compare policies on benchmarks, in a folder that a broken-off run goes on in."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtool.cli.eval_end import EvalWatcher, check_pictures, exit_with, rescore_run
from kvtool.cli.eval_options import EvalOptions
from kvtool.cli.output import write_configuration
from kvtool.cli.recipes import model_flags, read_given
from kvtool.cli.terminal import Terminal
from kvtool.errors import UsageError

if TYPE_CHECKING:
    from kvtool.documents.flags import Flags
    from kvtool.documents.results import ResultsDocument
    from kvtool.evaluation.comparison import Comparison
    from kvtool.evaluation.prepare import Prepared
    from kvtool.evaluation.run.gates import Gate
    from kvtool.evaluation.tasks.selection import TaskFlags
    from kvtool.watcher import Watcher

_TASK_SETTINGS = ("lengths", "depths", "samples", "prompts")


def evaluate(options: EvalOptions, terminal: Terminal) -> None:
    """Compare policies under budgets on benchmarks, with the full cache beside them."""
    if options.rescore is not None:
        rescore_run(options, split_policies(options.policy), gates_of(options), terminal)
        return
    comparison = _read(options)
    if options.format == "csv":
        from kvtool.report.board import check_board

        check_board(task.name for task in comparison.tasks)
    pictures = check_pictures(options, comparison.recipe.output.plots)
    watcher = EvalWatcher(options, terminal, pictures)
    if options.dry_run:
        _describe(comparison, options, watcher, terminal)
        return
    prepared = _prepare(comparison, options, watcher)
    exit_with(_run(prepared, options, watcher))


def _describe(
    comparison: Comparison, options: EvalOptions, watcher: Watcher, terminal: Terminal
) -> None:
    """Print what would be run; without the hub, what is known without it."""
    from kvtool.evaluation.outline import outline

    outlined = outline(comparison, options.output)
    if outlined is not None:
        write_configuration(outlined.describe(), options, terminal)
        terminal.note(outlined.missing)
        return
    from kvtool.evaluation.prepare import needs_in_words

    description = _prepare(comparison, options, watcher).describe()
    write_configuration(description, options, terminal)
    for line in needs_in_words(description):
        terminal.note(line)


def _read(options: EvalOptions) -> Comparison:
    """Return what is compared, by the recipe and the flags over it."""
    from kvtool.evaluation.comparison import read_comparison

    return read_comparison(
        read_given(options),
        _flags(options),
        _task_flags(options),
        gates_of(options),
        sets=options.set,
        unsets=options.unset,
        command="kvtool eval",
    )


def _prepare(comparison: Comparison, options: EvalOptions, watcher: Watcher) -> Prepared:
    from kvtool.evaluation.prepare import prepare

    code = options.trust_remote_code
    return prepare(comparison, options.output, watcher=watcher, trust_remote_code=code)


def _run(prepared: Prepared, options: EvalOptions, watcher: Watcher) -> ResultsDocument:
    from kvtool.evaluation.measure import run_prepared

    return run_prepared(
        prepared,
        watcher,
        overwrite=options.overwrite,
        stop_on_error=not options.continue_on_error,
        argv=["kvtool", *sys.argv[1:]],
    )


def gates_of(options: EvalOptions) -> list[Gate]:
    """Return the gates that flags set."""
    from kvtool.evaluation.run.gates import Gate, parse_least

    gates = [parse_least(text) for text in options.fail_under]
    if options.max_drop is not None:
        gates.append(Gate("*", max_drop=options.max_drop))
    return gates


def _flags(options: EvalOptions) -> Flags:
    """Return what the flags set, in the form of a recipe."""
    from kvtool.evaluation.evaluate import take_eval

    flags = model_flags(options)
    names = _given("--tasks", options.tasks, _split)
    flags.set("--tasks", [{"task": name} for name in names], "eval", "tasks")
    flags.set("--policy", _given("--policy", options.policy, split_policies), "policy")
    flags.set("--budget", _given("--budget", options.budget, _split), "budget")
    take_eval(
        flags,
        baseline=options.baseline,
        limit=options.limit,
        chat_template=options.chat_template,
        max_length=options.max_length,
        truncate=options.truncate,
        query_agnostic=options.query_agnostic,
        keep_question=options.keep_question,
        prefill=options.prefill,
        shared_prefill=options.shared_prefill,
        within=options.within,
    )
    return flags


def _task_flags(options: EvalOptions) -> TaskFlags:
    from kvtool.evaluation.tasks.selection import TaskFlags, parse_data

    values = {name: getattr(options, name) for name in _TASK_SETTINGS}
    return TaskFlags(values, parse_data(options.data))


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
