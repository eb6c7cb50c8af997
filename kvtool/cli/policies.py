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


_OWN = "a score of your own goes wherever a base does: my_package.my_module:MyScore(..)"


@dataclass(frozen=True, kw_only=True)
class PoliciesOptions(OutputOptions):
    """Options of `kvtool policies`."""


def policies(options: PoliciesOptions, terminal: Terminal) -> None:
    """List policies and modifiers: parameters, papers, and what each modifier goes on."""
    options.check_output()
    from kvtool.policies.table import describe

    entries = describe()
    form = options.choose_format("text")
    if form == "text" and terminal.interactive and options.output_path is None:
        _print_table(entries, terminal)
        terminal.note(_OWN)
        return
    render = {"text": _as_text, "json": _as_json, "yaml": _as_yaml}[form]
    write_data(render(entries), options, terminal)


def _print_table(entries: list[Entry], terminal: Terminal) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=terminal.data, markup=False, highlight=False)
    for kind, last in (("base", "budget"), ("modifier", "goes on")):
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in (kind, "what it does", "parameters", last, "paper"):
            table.add_column(column, overflow="fold")
        for entry in entries:
            if entry.kind == kind:
                end = entry.budget_kind if kind == "base" else " ".join(entry.goes_on)
                table.add_row(_name(entry), entry.summary, _spell(entry), end, entry.paper)
        console.print(table)


def _as_text(entries: list[Entry]) -> str:
    """Write a block per policy: a line `name - summary`, then indented lines."""
    blocks = []
    for entry in entries:
        blocks.append(
            f"{_name(entry)} - {entry.summary}\n"
            f"    parameters: {_spell(entry) or 'none'}\n"
            f"    budget: {entry.budget_kind}\n"
            + (f"    goes on: {' '.join(entry.goes_on)}\n" if entry.goes_on else "")
            + f"    paper: {entry.paper}\n"
        )
    return "".join(blocks)


def _as_json(entries: list[Entry]) -> str:
    return json.dumps([asdict(entry) for entry in entries], indent=2, ensure_ascii=False) + "\n"


def _as_yaml(entries: list[Entry]) -> str:
    import yaml

    data = json.loads(_as_json(entries))  # tuples are lists, as in JSON
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)


def _name(entry: Entry) -> str:
    return entry.name if entry.kind == "base" else f"+{entry.name}"


def _spell(entry: Entry) -> str:
    def spell(value: object) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    return ", ".join(f"{name}={spell(value)}" for name, value in entry.parameters.items())
