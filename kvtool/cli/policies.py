"""`kvtool policies`: the table of policies and modifiers, one of them in full, or one checked."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvtool.calls.output_settings import OutputSettings
from kvtool.cli.output import write_data
from kvtool.cli.terminal import Terminal
from kvtool.documents.settings import flag
from kvtool.errors import PolicyError, UsageError
from kvtool.policies.installed import about, describe_installed
from kvtool.policies.table import describe
from kvtool.sizes import WIDTH

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvtool.policies.table import About

_OWN = "a score of your own goes wherever a base does: my_package.my_module:MyScore(..)"


@dataclass(frozen=True, kw_only=True)
class PoliciesSettings(OutputSettings):
    """What `kvtool policies` is asked."""

    name: str | None = flag("[NAME]", "A policy or modifier, or a score as MODULE:CLASS.")
    check: bool = flag(
        "--check", "Hold the policy against the contract, on a small random model.", default=False
    )


def policies(options: PoliciesSettings, terminal: Terminal) -> None:
    """List policies and modifiers with their parameters, show one in full, or check one."""
    options.check_output()
    if options.check:
        _check(options, terminal)
    elif options.name is not None:
        from kvtool.cli.policy_tables import one_policy

        one = about(options.name)
        _write(_data(one), one_policy(one), options, terminal)
    else:
        _list(options, terminal)


def _list(options: PoliciesSettings, terminal: Terminal) -> None:
    from kvtool.cli.policy_tables import AllPolicies

    added, warnings = describe_installed()
    entries = [*describe(), *added]
    for line in warnings:
        terminal.note(f"warning: {line}")
    _write([asdict(entry) for entry in entries], AllPolicies(entries), options, terminal)
    if terminal.interactive and options.choose_format("text") == "text":
        terminal.note(_OWN)


def _check(options: PoliciesSettings, terminal: Terminal) -> None:
    """Check one policy; exit 1 where it fails."""
    if options.name is None:
        raise UsageError(
            "--check needs a policy", hint="kvtool policies my_policies:MyScore --check"
        )
    from kvtool.calls.check_policy import check_policy
    from kvtool.cli.policy_tables import checked_policy

    report = check_policy(options.name, raises=False)
    data = {**asdict(report), "passed": report.passed}
    _write(data, checked_policy(report), options, terminal)
    if not report.passed:
        message = f"{report.policy} fails {len(report.failed)} of {len(report.checks)} checks"
        raise PolicyError(message)


def _data(one: About) -> dict[str, Any]:
    return asdict(one.entry) | {
        "takes": [f"{spelled}+{modifier}" for modifier, spelled in one.takes.items()],
        "settings": [asdict(each) for each in one.settings],
        "text": one.text,
    }


def _write(data: Any, table: RenderableType, options: PoliciesSettings, terminal: Terminal) -> None:
    form = options.choose_format("text")
    if form == "text" and terminal.interactive and options.output_path is None:
        terminal.print(table)
        return
    if form == "text":
        from kvtool.report.text import plain_text

        write_data(plain_text(table, WIDTH), options, terminal)
        return
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    if form == "yaml":
        from kvtool.documents.yaml_writer import dump_yaml

        text = dump_yaml(json.loads(text))  # tuples are lists, as in JSON
    write_data(text, options, terminal)
