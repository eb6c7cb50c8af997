"""`kvtool plan-budget`: tokens per layer for a target, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.calls.plan_settings import PlanSettings
from kvtool.cli.output import write_configuration, write_shown
from kvtool.cli.terminal import Terminal, TerminalWatcher

if TYPE_CHECKING:
    from kvtool.documents.plan import PlanDocument


def plan_budget(options: PlanSettings, terminal: Terminal) -> None:
    """Plan budgets of all layers for a target: tokens, a share of the prompt, or bytes.

    Weights are never loaded.
    """
    _ = options.target
    options.check_output()
    from kvtool.calls.plan import prepare_plan

    watcher = TerminalWatcher(terminal)
    run = prepare_plan(options, watcher)
    if options.dry_run:
        write_configuration(run.describe(), options, terminal)
        return
    document = run.make(watcher)
    _write(document, options, terminal)
    command = run.command(document, str(options.output_path or "plan.yaml"))
    if command is not None:
        _note_command(command, options, terminal)


def _note_command(command: str, options: PlanSettings, terminal: Terminal) -> None:
    saved = "-o plan.yaml writes it" if terminal.interactive else "what stands on stdout"
    where = "" if options.output_path else f" (plan.yaml: {saved})"
    terminal.note(f"run it{where}, with --prompt-file FILE for a text of yours:")
    terminal.note(f"  {command}")


def _write(document: PlanDocument, options: PlanSettings, terminal: Terminal) -> None:
    if options.plot_path is not None:
        from kvtool.report.plans import draw_plan

        draw_plan(document, options.plot_path)
        terminal.note(f"wrote {options.plot_path}")
    write_shown(document, options, terminal)
