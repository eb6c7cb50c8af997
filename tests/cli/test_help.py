"""The help of every command: panels, examples, whole sentences; names that a shell completes."""

import re
import shlex
from typing import get_type_hints

import pytest

from kvtool.cli.help import EXAMPLES, PANELS
from kvtool.cli.main import COMMANDS, Commands, app
from kvtool.cli.options import complete_policies, complete_tasks
from kvtool.documents.settings import settings_of


def options_of(command):
    """Return the settings of a command."""
    from importlib import import_module

    file, _, function = COMMANDS[command].partition(":")
    kind = get_type_hints(getattr(import_module(f"kvtool.cli.{file}"), function))["options"]
    return list(settings_of(kind))


def panels_of(text):
    return re.findall(r"^([A-Z][a-z ]+):$", text, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_has_every_option_once_and_three_examples(kvtool, command):
    shown = kvtool(command, "--help").out
    listed = re.findall(r"^  (-[^\s,]+(?:(?:, | / )-[^\s,]+)*)", shown, re.MULTILINE)
    listed = [name for names in listed for name in re.split(", | / ", names)]
    names = [name for each in options_of(command) for name in re.split("[ /]", each.flag.names)]
    assert sorted(listed) == sorted([*filter(None, names), "-h", "--help"])
    panels = panels_of(shown)
    assert panels == [name for name in ("Arguments", *PANELS, "More", "Examples") if name in panels]
    assert shown.count("\n  kvtool ") == len(EXAMPLES[command]) == 3


def test_panels_hold_options_that_there_are():
    known = {each.name for command in COMMANDS for each in options_of(command)}
    named = [name for names in PANELS.values() for name in names]
    assert not {*named} - known
    assert len({*named}) == len(named)


def test_examples_are_commands_that_are_read():
    import typer

    group = typer.main.get_command(app)
    assert isinstance(group, Commands)
    for line in [line for lines in EXAMPLES.values() for line in lines]:
        program, command, *arguments = shlex.split(line)
        assert program == "kvtool"
        one = group.get_command(None, command)
        assert one.make_context(command, arguments).params


def test_policies_are_completed():
    assert complete_policies("snap") == ["snapkv"]
    assert "h2o,tova" in complete_policies("h2o,to")
    assert complete_policies("h2o+cao") == ["h2o+caote"]
    assert complete_policies("nothing") == []


def test_tasks_are_completed():
    assert "niah/passkey" in complete_tasks("niah")
    assert complete_tasks("niah,niah/pa") == ["niah,niah/passkey"]
