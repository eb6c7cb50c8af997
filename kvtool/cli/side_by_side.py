"""`kvtool generate` with two policies: their answers below that of the full cache."""

from __future__ import annotations

from collections.abc import Sequence

from typer import Exit

from kvtool.calls.listener import Listener
from kvtool.calls.settings import GenerationSettings
from kvtool.cli.interruption import Interruption
from kvtool.cli.output import write_configuration, write_data
from kvtool.cli.terminal import Terminal
from kvtool.cli.watching import TerminalWatcher
from kvtool.errors import UsageError


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
    from kvtool.calls.side_by_side import prepare_side_by_side

    watcher = TerminalWatcher(terminal)
    runs = prepare_side_by_side(options, policies, watcher)
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
