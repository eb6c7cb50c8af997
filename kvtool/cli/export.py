"""`kvtool export`: write a compressed cache as another engine loads it."""

from __future__ import annotations

from kvtool.calls.export import ExportSettings
from kvtool.cli.output import render, write_configuration, write_data
from kvtool.cli.terminal import Terminal, TerminalWatcher
from kvtool.processes import check_alone


def export(options: ExportSettings, terminal: Terminal) -> None:
    """Export a compressed cache, for another engine to load in place of a prompt."""
    check_alone("export")
    options.check()
    if options.dry_run:
        write_configuration(options.describe(), options, terminal)
        return
    document = options.run(TerminalWatcher(terminal))
    form = options.choose_format("text" if terminal.interactive else "json")
    write_data(render(document, form, f"{document.in_words()}\n"), options, terminal)
    terminal.note(f"saved {document.saved}")
