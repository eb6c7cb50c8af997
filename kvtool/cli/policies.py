"""`kvtool policies`: the table of policies and modifiers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvtool.cli.options import OutputOptions
from kvtool.cli.output import write_data
from kvtool.cli.terminal import Terminal

if TYPE_CHECKING:
    from kvtool.policies.table import Entry


@dataclass(frozen=True, kw_only=True)
class PoliciesOptions(OutputOptions):
    """Options of `kvtool policies`."""


def policies(options: PoliciesOptions, terminal: Terminal) -> None:
    """List policies and modifiers, with their parameters and papers."""
    options.check_output()
    from kvtool.policies.table import describe

    entries = describe()
    form = options.choose_format("text")
    if form == "text" and terminal.interactive and options.output_path is None:
        _print_table(entries, terminal)
        return
    render = {"text": _as_text, "json": _as_json, "yaml": _as_yaml}[form]
    write_data(render(entries), options, terminal)


def _print_table(entries: list[Entry], terminal: Terminal) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "what it does", "parameters", "budget", "paper"):
        table.add_column(column, overflow="fold")
    for kind in ("base", "modifier"):
        for entry in entries:
            if entry.kind == kind:
                name = entry.name if kind == "base" else f"+{entry.name}"
                table.add_row(name, entry.summary, _spell(entry), entry.budget_kind, entry.paper)
    Console(file=terminal.data, markup=False, highlight=False).print(table)


def _as_text(entries: list[Entry]) -> str:
    """One block per policy: a line `name - summary`, then indented lines."""
    blocks = []
    for entry in entries:
        name = entry.name if entry.kind == "base" else f"+{entry.name}"
        blocks.append(
            f"{name} - {entry.summary}\n"
            f"    parameters: {_spell(entry) or 'none'}\n"
            f"    budget: {entry.budget_kind}\n"
            f"    paper: {entry.paper}\n"
        )
    return "".join(blocks)


def _as_json(entries: list[Entry]) -> str:
    return json.dumps([asdict(entry) for entry in entries], indent=2, ensure_ascii=False) + "\n"


def _as_yaml(entries: list[Entry]) -> str:
    import yaml

    data = [asdict(entry) for entry in entries]
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)


def _spell(entry: Entry) -> str:
    def spell(value: object) -> str:
        return str(value).lower() if value is None or isinstance(value, bool) else str(value)

    return ", ".join(f"{name}={spell(value)}" for name, value in entry.parameters.items())
