"""Values of options are what typer makes of them, whether or not it is asked."""

import typer
from typer._click.exceptions import BadParameter
from typer.core import TyperArgument, TyperOption

from kvtool.cli.main import COMMANDS, app
from kvtool.cli.plain_values import PlainArgument, PlainOption

TYPED = ["", "a b", "auto", "AUTO", "float16", "json", "7", "-1", "0.5", "true", "\udcff", None]
SEVERAL = [(), ("a", "b"), ("7", "\udcff"), ["auto"]]


def parameters():
    group = typer.main.get_command(app)
    for name in COMMANDS:
        command = group.get_command(None, name)
        yield from ((command, each) for each in command.get_params(typer.Context(command)))


def read(kind, parameter, context, value):
    """What a parameter makes of a value, as one of a class; a mistake by its message."""
    try:
        return kind.process_value(parameter, context, value)
    except BadParameter as error:
        return error.format_message()


def test_every_value_is_read_as_typer_reads_it():
    seen = set()
    for command, parameter in parameters():
        if parameter.name == "help":  # which is reported at once
            continue
        context = typer.Context(command)
        typers = TyperOption if isinstance(parameter, PlainOption) else TyperArgument
        assert isinstance(parameter, (PlainOption, PlainArgument))
        values = [None, *SEVERAL] if parameter.multiple else [*TYPED, parameter.default]
        for value in values:
            expected = read(typers, parameter, context, value)
            found = read(type(parameter), parameter, context, value)
            assert found == expected, (parameter.name, value)
            if expected or not parameter.multiple:
                assert type(found) is type(expected), (parameter.name, value)
        seen.add(str(parameter.type_descriptor.annotation))
    assert {"<class 'str'>", "<class 'int'>", "list[str]"} <= seen


def test_parameters_are_the_same_at_every_call():
    """Typer distinguishes them by identity."""
    group = typer.main.get_command(app)
    for name in COMMANDS:
        command = group.get_command(None, name)
        context = typer.Context(command)
        first, second = command.get_params(context), command.get_params(context)
        assert all(one is other for one, other in zip(first, second, strict=True))
