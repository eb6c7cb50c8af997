"""`kvtool policies`: the table of policies and modifiers, or one of them in full."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from kvtool.cli.options import OutputOptions
from kvtool.cli.output import write_data
from kvtool.cli.terminal import Terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvtool.policies.about import About

_OWN = "a score of your own goes wherever a base does: my_package.my_module:MyScore(..)"


@dataclass(frozen=True, kw_only=True)
class PoliciesOptions(OutputOptions):
    """Options of `kvtool policies`."""

    name: Annotated[
        str | None, Argument(metavar="[NAME]", help="A policy or modifier, told in full.")
    ] = None


def policies(options: PoliciesOptions, terminal: Terminal) -> None:
    """List policies and modifiers with their parameters, or tell all of one."""
    options.check_output()
    from kvtool.cli.policy_tables import AllPolicies, one_policy
    from kvtool.policies.about import about
    from kvtool.policies.table import describe

    if options.name is not None:
        one = about(options.name)
        _write(_data(one), one_policy(one), options, terminal)
        return
    entries = describe()
    _write([asdict(entry) for entry in entries], AllPolicies(entries), options, terminal)
    if terminal.interactive and options.choose_format("text") == "text":
        terminal.note(_OWN)


def _data(one: About) -> dict[str, Any]:
    return asdict(one.entry) | {
        "takes": [f"{spelled}+{modifier}" for modifier, spelled in one.takes.items()],
        "settings": [asdict(each) for each in one.settings],
        "text": one.text,
    }


def _write(data: Any, table: RenderableType, options: PoliciesOptions, terminal: Terminal) -> None:
    form = options.choose_format("text")
    if form == "text" and terminal.interactive and options.output_path is None:
        terminal.print(table)
        return
    if form == "text":
        from kvtool.cli.tables import as_text

        write_data(as_text(table), options, terminal)
        return
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    if form == "yaml":
        from kvtool.documents.yaml_writer import dump_yaml

        text = dump_yaml(json.loads(text))  # tuples are lists, as in JSON
    write_data(text, options, terminal)
