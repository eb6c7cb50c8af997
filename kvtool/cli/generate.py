"""`kvtool generate`: text under a KV budget.

It answers one prompt or conversation, the many prompts of a file, or one prompt with two policies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typer import Exit

from kvtool.calls.output_settings import OutputSettings
from kvtool.calls.settings import GenerationSettings
from kvtool.cli.output import render, write_configuration, write_data
from kvtool.cli.terminal import Interruption, Terminal, TerminalWatcher, tell
from kvtool.errors import UsageError
from kvtool.policies.grammar import listed_policies
from kvtool.watcher import Listener

if TYPE_CHECKING:
    from kvtool.calls.prompts import PromptsRun
    from kvtool.documents.generation import GenerationDocument
    from kvtool.documents.plan import PlanDocument
    from kvtool.documents.prompts import AnswerLine


def text_on_stdout(options: OutputSettings) -> bool:
    """Return whether the data on stdout is the text itself."""
    return options.choose_format("text") == "text" and options.output_path is None


def listen(
    options: OutputSettings, stream: bool | None, terminal: Terminal, interrupted: Interruption
) -> Listener:
    """Return what prints answers.

    Args:
        stream: whether as they come; None: to a person who reads stdout.
        interrupted: ends them.
    """
    piece = _choose_stream(options, stream, terminal)

    def print_rest(answer: str) -> None:
        if piece is not None:
            piece("\n")
        elif text_on_stdout(options):
            terminal.write(f"{answer}\n")

    return Listener(piece, print_rest, interrupted)


def show(
    document: GenerationDocument,
    options: OutputSettings,
    terminal: Terminal,
    interrupted: Interruption,
) -> None:
    """Write the document, if the text is not the data, and say what was held."""
    if not text_on_stdout(options):
        text = render(document, options.choose_format("text"), f"{document.text}\n")
        write_data(text, options, terminal)
    terminal.note(f"{'interrupted: ' if interrupted.pressed else ''}{document.in_words()}")


def _choose_stream(
    options: OutputSettings, wanted: bool | None, terminal: Terminal
) -> Callable[[str], Any] | None:
    """Return what takes the text as it comes: stdout if text is the data there, else stderr."""
    if text_on_stdout(options) and (terminal.interactive if wanted is None else wanted):
        return terminal.write
    if wanted and not options.quiet:
        return tell
    return None


def answer_many(options: GenerationSettings, terminal: Terminal) -> None:
    """Answer the prompts of a file: in order on stdout, or as they end into a file."""
    form = options.choose_format("text")
    if form == "yaml" and not options.dry_run:
        raise UsageError("--prompts writes text or lines of JSON, got --format yaml")
    if options.stream is not None:
        raise UsageError("--prompts and --stream exclude each other: answers come in whole")
    if listed_policies(options.policy):
        raise UsageError(f"--prompts takes one policy, got `{options.policy}`")
    if not options.dry_run:
        terminal.loading(options.model)
    resolved = _resolved(options)
    from kvtool.calls.prompts import prepare_prompts

    on_screen = options.output_path is None and terminal.interactive  # where no bar may be between
    watcher = TerminalWatcher(replace(terminal, progress=terminal.progress and not on_screen))
    run = prepare_prompts(*resolved, watcher)
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
    from kvtool.documents.prompts import AnswersFile
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


def set_side_by_side(
    policies: Sequence[str], options: GenerationSettings, terminal: Terminal
) -> None:
    """Answer a prompt with the full cache and two policies, and show what these kept."""
    if options.choose_format("text") != "text":
        raise UsageError(
            f"--format {options.choose_format('text')} describes one answer, and {len(policies)} "
            "policies give several",
            hint="run one policy at a time",
        )
    if not options.dry_run:
        terminal.loading(options.model)
    resolved = _resolved(replace(options, policy=policies[0]))
    from kvtool.calls.side_by_side import prepare_side_by_side

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
    if interrupted.pressed:
        raise Exit(130)


def generate(options: GenerationSettings, terminal: Terminal) -> None:
    """Generate text under a KV-cache budget.

    Without a prompt, a built-in one plants a code in a long text and asks for it.
    """
    options.check_output()
    if options.prompts is not None:
        answer_many(options, terminal)
        return
    options = _with_memory(options)
    for name in ("skip_bad", "overwrite"):
        if getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} goes with --prompts", hint="--prompts FILE.jsonl")
    policies = listed_policies(options.policy)
    if policies:
        set_side_by_side(policies, options, terminal)
    else:
        _answer(options, terminal)


def _with_memory(options: GenerationSettings) -> GenerationSettings:
    """Return options in which `--memory` of one prompt is that of the device.

    Raises:
        UsageError: both are given.
    """
    if options.memory is None:
        return options
    if options.device_memory is not None:
        raise UsageError("--memory and --device-memory are the same here; keep one")
    return replace(options, device_memory=options.memory, memory=None)


def _resolved(options: GenerationSettings) -> tuple[GenerationSettings, PlanDocument | None]:
    """Refuse a bad recipe before the files that prepare a run are imported."""
    from kvtool.calls.resolve import resolve_settings

    return resolve_settings(options, "kvtool generate")


def _answer(options: GenerationSettings, terminal: Terminal) -> None:
    if not options.dry_run:
        terminal.loading(options.model)
    resolved = _resolved(options)
    from kvtool.calls.generate import prepare_generation

    watcher = TerminalWatcher(terminal)
    run = prepare_generation(*resolved, watcher)
    if options.dry_run:
        write_configuration(run.describe(), options, terminal)
        return
    with Interruption() as interrupted:
        generated = run.run(watcher, listen(options, options.stream, terminal, interrupted))
    show(generated.document, options, terminal, interrupted)
    generated.finish(watcher)
    if interrupted.pressed:
        raise Exit(130)
