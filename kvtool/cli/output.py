"""Write data where the options say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvtool.calls.output_settings import Format, OutputSettings
from kvtool.cli.terminal import Terminal
from kvtool.documents.files import write_text

if TYPE_CHECKING:
    from kvtool.documents.document import Document, ShownDocument


def write_data(text: str, options: OutputSettings, terminal: Terminal) -> None:
    """Write to the output file, atomically, or to stdout."""
    if options.output_path is None:
        terminal.write(text)
    else:
        write_text(options.output_path, text)
        terminal.note(f"wrote {options.output_path}")


def render(document: Document, form: Format, text: str) -> str:
    """Return a document in the form asked for; `text` is what a person reads."""
    return {"json": document.to_json, "yaml": document.to_yaml, "text": lambda: text}[form]()


def write_shown(document: ShownDocument, options: OutputSettings, terminal: Terminal) -> None:
    """Write a document: as tables and pictures on a terminal, as YAML in a pipe or a file."""
    shown = terminal.interactive and options.output_path is None
    form = options.choose_format("text" if shown else "yaml")
    if form == "text" and shown:
        from kvtool.report.text import layout

        terminal.print(layout(document))
        return
    text = document.table() if form == "text" else ""
    write_data(render(document, form, text), options, terminal)


def write_configuration(configuration: Any, options: OutputSettings, terminal: Terminal) -> None:
    """Print what a command would do: JSON if asked for, YAML else; say what memory it would take.

    A person at a terminal reads of the memory of one run in words alone.

    Args:
        configuration: dictionaries, lists, scalars, and sections of documents.
    """
    from kvtool.documents.document import Section
    from kvtool.documents.memory import RunMemory, UnknownMemory
    from kvtool.documents.yaml_writer import dump_yaml

    form = options.choose_format("yaml")
    several = isinstance(configuration, list)
    parts = configuration if several else [configuration]
    memories = [part.get("memory") for part in parts]
    if form == "yaml" and terminal.interactive and not terminal.quiet:
        told = RunMemory, UnknownMemory
        parts = [
            {key: part[key] for key in part if not isinstance(part[key], told)} for part in parts
        ]

    def plain(value: Any) -> Any:
        if isinstance(value, Section):
            return value.model_dump(mode="json")
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, UnknownMemory):
            return None
        return [plain(inner) for inner in value] if isinstance(value, list) else value

    data = plain(parts if several else parts[0])
    if form == "json":
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    else:
        sections = [] if several else parts[0].items()
        sections = [(key, value) for key, value in sections if isinstance(value, Section)]
        units = {(key, *path): unit for key, value in sections for path, unit in value.units()}
        text = dump_yaml(data, units)
    terminal.write(text)
    for memory in memories:
        for line in _memory_lines(memory):
            terminal.note(line)


def _memory_lines(memory: Any) -> list[str]:
    """Say what memory a run would take, or why that is not known."""
    from kvtool.documents.memory import RunMemory, UnknownMemory

    if isinstance(memory, RunMemory):
        return memory.plan or [memory.in_words()]
    if not isinstance(memory, UnknownMemory):
        return []
    hint = [] if memory.hint is None else [f"hint: {memory.hint}"]
    return [f"memory: unknown, {memory.reason}", *hint]
