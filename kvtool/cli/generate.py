"""`kvtool generate`: text under a KV budget.

It answers one prompt or conversation, the many prompts of a file, or one prompt with two policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Exit

from kvtool.calls.settings import GenerationSettings
from kvtool.cli.output import render, write_configuration, write_data
from kvtool.cli.terminal import Interruption, Terminal, TerminalWatcher, tell
from kvtool.errors import UsageError
from kvtool.policies.grammar import listed_policies
from kvtool.watcher import Listener

if TYPE_CHECKING:
    from kvtool.calls.prompts import PromptsRun
    from kvtool.documents.plan import PlanDocument
    from kvtool.documents.prompts import AnswerLine


def _answer_many(options: GenerationSettings, terminal: Terminal) -> None:
    """Answer the prompts of a file: in order on stdout, or as they end into a file."""
    form = options.choose_format("text")
    excluded = {
        "--format yaml": form == "yaml" and not options.dry_run,
        "--stream": options.stream is not None,
        "several policies": bool(listed_policies(options.policy)),
    }
    for what, given in excluded.items():
        if given:
            raise UsageError(f"--prompts and {what} exclude each other")
    resolved = _resolved(options, terminal)
    from kvtool.calls.prompts import prepare_prompts

    path = options.output_path
    on_screen = path is None and terminal.interactive  # where no bar may be between
    watcher = TerminalWatcher(replace(terminal, progress=terminal.progress and not on_screen))
    run = prepare_prompts(*resolved, watcher)
    if options.dry_run:
        write_configuration(run.describe(), options, terminal)
        return
    with Interruption() as interrupted:
        if path is None:
            bad = _print(run, form == "json", terminal, watcher, interrupted)
        else:
            bad = _write(run, path, options.overwrite, watcher, interrupted)
    if bad and not interrupted.pressed:
        terminal.note(f"{bad} of {len(run.prompts)} prompts could not be answered")
        raise Exit(4)
    interrupted.exit()


def _print(
    run: PromptsRun,
    as_json: bool,
    terminal: Terminal,
    watcher: TerminalWatcher,
    interrupted: Interruption,
) -> int:
    """Print the answers in order, and return how many prompts have none."""
    early: dict[int, AnswerLine] = {}
    printed, bad = 0, 0
    for answer in run.run(watcher, {}, interrupted):
        bad += answer.error is not None
        early[answer.index] = answer
        while printed in early:
            own = early.pop(printed)
            terminal.write(own.to_line() if as_json else f"{own.text}\n")
            printed += 1
    return bad


def _write(
    run: PromptsRun,
    path: Path,
    overwrite: bool,
    watcher: TerminalWatcher,
    interrupted: Interruption,
) -> int:
    """Write the answers as they end, and return how many prompts have none."""
    from kvtool.documents.prompts import AnswersFile

    file = AnswersFile(path, overwrite=overwrite)
    with file.opened():
        if file.answers:
            watcher.note(f"{len(file.answers)} of {len(run.prompts)} prompts are answered already")
        for answer in run.run(watcher, dict(file.answers), interrupted):
            file.append(answer)
        file.put_in_order()
    watcher.note(f"wrote {path}")
    return sum(answer.error is not None for answer in file.answers.values())


def _set_side_by_side(
    policies: Sequence[str], options: GenerationSettings, terminal: Terminal
) -> None:
    """Answer a prompt with the full cache and two policies, and show what these kept."""
    if options.choose_format("text") != "text":
        raise UsageError(
            f"--format {options.choose_format('text')} describes one answer, and {len(policies)} "
            "policies give several",
            hint="run one policy at a time",
        )
    resolved = _resolved(replace(options, policy=policies[0]), terminal)
    from kvtool.calls.generate import prepare_side_by_side

    watcher = TerminalWatcher(terminal)
    runs = prepare_side_by_side(*resolved, policies, watcher)
    if options.dry_run:
        write_configuration(runs.describe(), options, terminal)
        return
    answers = []
    with Interruption() as interrupted:
        for each in runs.run(watcher, Listener(stop_when=interrupted)):
            answers.append(f"{each.policy}: {each.text.strip()}\n")
            if options.output_path is None:
                terminal.write(answers[-1])
            terminal.note(f"{each.policy}: {each.in_words()}")
    if options.output_path is not None:
        write_data("".join(answers), options, terminal)
    interrupted.exit()


def generate(options: GenerationSettings, terminal: Terminal) -> None:
    """Generate text under a KV-cache budget.

    Without a prompt, a built-in one plants a code in a long text and asks for it.
    """
    policies = listed_policies(options.policy)
    if options.prompts is not None:
        _answer_many(options, terminal)
    elif policies:
        _set_side_by_side(policies, _of_one_prompt(options), terminal)
    else:
        _answer(_of_one_prompt(options), terminal)


def _of_one_prompt(options: GenerationSettings) -> GenerationSettings:
    """Return options in which `--memory` is that of the device."""
    for name in ("skip_bad", "overwrite"):
        if getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} goes with --prompts", hint="--prompts FILE.jsonl")
    if options.memory is None:
        return options
    if options.device_memory is not None:
        raise UsageError("--memory and --device-memory are the same here; keep one")
    return replace(options, device_memory=options.memory, memory=None)


def _resolved(
    options: GenerationSettings, terminal: Terminal
) -> tuple[GenerationSettings, PlanDocument | None]:
    """Refuse a bad recipe before the files that prepare a run are imported."""
    if not options.dry_run:
        terminal.loading(options.model)
    from kvtool.calls.resolve import resolve_settings

    return resolve_settings(options, "kvtool generate")


def _answer(options: GenerationSettings, terminal: Terminal) -> None:
    resolved = _resolved(options, terminal)
    from kvtool.calls.generate import prepare_generation

    watcher = TerminalWatcher(terminal)
    run = prepare_generation(*resolved, watcher)
    if options.dry_run:
        write_configuration(run.describe(), options, terminal)
        return
    with Interruption() as interrupted:
        generated = run.run(watcher, _listener(options, terminal, interrupted))
    document = generated.document
    if not _text_on_stdout(options):
        text = render(document, options.choose_format("text"), f"{document.text}\n")
        write_data(text, options, terminal)
    terminal.note(f"{'interrupted: ' if interrupted.pressed else ''}{document.in_words()}")
    generated.finish(watcher)
    interrupted.exit()


def _text_on_stdout(options: GenerationSettings) -> bool:
    """Return whether the data on stdout is the text itself."""
    return options.choose_format("text") == "text" and options.output_path is None


def _listener(
    options: GenerationSettings, terminal: Terminal, interrupted: Interruption
) -> Listener:
    """Return what prints answers: as they come, by default to a person who reads stdout."""
    on_stdout, piece, wanted = _text_on_stdout(options), None, options.stream
    if on_stdout and (terminal.interactive if wanted is None else wanted):
        piece = terminal.write
    elif wanted and not options.quiet:
        piece = tell

    def print_rest(answer: str) -> None:
        if piece is not None:
            piece("\n")
        elif on_stdout:
            terminal.write(f"{answer}\n")

    return Listener(piece, print_rest, interrupted)
