"""`kvtool serve`: answer OpenAI clients under a KV budget."""

from __future__ import annotations

from kvtool.calls.serve_settings import ServeSettings
from kvtool.cli.output import write_configuration
from kvtool.cli.terminal import Terminal, TerminalWatcher


def serve(options: ServeSettings, terminal: Terminal) -> None:
    """Serve a model under a KV-cache budget to OpenAI clients, until Ctrl-C."""
    options.check_output()
    if not options.dry_run:
        terminal.loading(options.model)
    from kvtool.calls.serve import prepare_serve

    watcher = TerminalWatcher(terminal)
    run = prepare_serve(options, watcher)
    if options.dry_run:
        write_configuration(run.describe(), options, terminal)
        return
    run.run(watcher, lambda address, end: terminal.note(f"listening on {address}"))
