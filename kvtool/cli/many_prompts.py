"""`kvtool generate --prompts`: many prompts, each answered as it would be alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typer import Exit

from kvtool.calls.settings import GenerationSettings
from kvtool.cli.interruption import Interruption
from kvtool.cli.output import write_configuration
from kvtool.cli.terminal import Terminal
from kvtool.cli.watching import TerminalWatcher
from kvtool.errors import UsageError

if TYPE_CHECKING:
    from kvtool.calls.prompts import PromptsRun
    from kvtool.documents.answers import AnswerLine


def answer_many(options: GenerationSettings, terminal: Terminal) -> None:
    """Answer the prompts of a file: in order on stdout, or as they end into a file."""
    form = options.choose_format("text")
    if form == "yaml" and not options.dry_run:
        raise UsageError("--prompts writes text or lines of JSON, got --format yaml")
    if options.stream is not None:
        raise UsageError("--prompts and --stream exclude each other: answers come in whole")
    from kvtool.policies.grammar import listed_policies

    if listed_policies(options.policy):
        raise UsageError(f"--prompts takes one policy, got `{options.policy}`")
    from kvtool.calls.prompts import prepare_prompts

    watcher = TerminalWatcher(terminal)
    run = prepare_prompts(options, watcher)
    if options.dry_run:
        write_configuration(run.describe(), options, terminal)
        return
    with Interruption() as interrupted:
        if options.output_path is None:
            bad = _print(run, form == "json", terminal, watcher, interrupted)
        else:
            bad = _write(run, options, terminal, watcher, interrupted)
    if interrupted.pressed:
        raise Exit(130)
    if bad:
        terminal.note(f"{bad} of {len(run.prompts)} prompts could not be answered")
        raise Exit(4)


def _print(
    run: PromptsRun,
    as_json: bool,
    terminal: Terminal,
    watcher: TerminalWatcher,
    interrupted: Interruption,
) -> int:
    """Print the answers in order, and return how many prompts have none."""
    from kvtool.generation.serving import Served

    early: dict[int, AnswerLine] = {}
    served, printed, bad = Served(), 0, 0
    for answer in run.run(watcher, {}, served=served, stop_when=interrupted):
        bad += answer.error is not None
        early[answer.index] = answer
        while printed in early:
            own = early.pop(printed)
            terminal.write(own.to_line() if as_json else f"{own.text}\n")
            printed += 1
    terminal.note(served.in_words(printed + len(early) - bad))
    return bad


def _write(
    run: PromptsRun,
    options: GenerationSettings,
    terminal: Terminal,
    watcher: TerminalWatcher,
    interrupted: Interruption,
) -> int:
    """Write the answers as they end, and return how many prompts have none."""
    from kvtool.documents.answers import AnswersFile
    from kvtool.generation.serving import Served

    if options.output_path is None:
        return 0
    file, served = AnswersFile(options.output_path, overwrite=options.overwrite), Served()
    with file.opened():
        before = len(file.answers)
        if before:
            terminal.note(f"{before} of {len(run.prompts)} prompts are answered already")
        for answer in run.run(watcher, dict(file.answers), served=served, stop_when=interrupted):
            file.append(answer)
        file.put_in_order()
    bad = sum(answer.error is not None for answer in file.answers.values())
    terminal.note(served.in_words(len(file.answers) - before - bad))
    terminal.note(f"wrote {options.output_path}")
    return bad
