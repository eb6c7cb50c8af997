"""`kvtool compress`: read a prompt once, keep its compressed cache in a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.calls.settings import CompressionSettings
from kvtool.cli.output import render, write_configuration, write_data
from kvtool.cli.terminal import Terminal, TerminalWatcher
from kvtool.errors import UsageError
from kvtool.processes import check_alone

if TYPE_CHECKING:
    from kvtool.calls.compress import CompressionRun


def compress(options: CompressionSettings, terminal: Terminal) -> None:
    """Compress the cache of a prompt into a file, for `kvtool generate --cache`."""
    check_alone("compress")
    if options.save is None and not options.export_paths:
        raise UsageError("no file to save to", hint="--save book.kv.safetensors")
    watcher = TerminalWatcher(terminal)
    run = _prepare(options, terminal, watcher)
    if options.dry_run:
        write_configuration(run.describe(), options, terminal)
        return
    document = run.run(watcher)[1]
    form = options.choose_format("text" if terminal.interactive else "json")
    write_data(render(document, form, f"{document.in_words()}\n"), options, terminal)
    if options.save is not None:
        terminal.note(f"saved {document.saved}")


def _prepare(
    options: CompressionSettings, terminal: Terminal, watcher: TerminalWatcher
) -> CompressionRun:
    """Refuse a bad recipe before the files that prepare a run are imported."""
    if not options.dry_run:
        terminal.loading(options.model)
    from kvtool.calls.resolve import resolve_settings

    resolved = resolve_settings(options, "kvtool compress")
    from kvtool.calls.compress import prepare_compression

    return prepare_compression(*resolved, watcher)
