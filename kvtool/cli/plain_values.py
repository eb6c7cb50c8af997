"""Options and arguments whose plain values are taken as they are, without building validators.

Typer reads every value, given or not, through a validator of pydantic, whose import takes longer
than all else that a small command does. A text is that text, and one of several choices needs a
look at the choices only; whatever is neither, and every mistake, is left to typer.
"""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from typer.core import TyperArgument, TyperOption

from kvtool.errors import printable


class _PlainValues:
    """A parameter of typer that asks it for what is not plain."""

    def process_value(self, ctx: Any, value: Any) -> Any:
        """Return the value of the type that the parameter is declared with."""
        parameter: Any = self
        kind = parameter.type_descriptor.annotation
        if parameter.required or not _is_plain(value, kind):
            return super().process_value(ctx, value)  # type: ignore[misc]
        if parameter.multiple or parameter.nargs == -1:
            value = () if value is None else list(value)
        return value if parameter.callback is None else parameter.callback(ctx, parameter, value)


class PlainOption(_PlainValues, TyperOption):
    """An option whose plain values are taken as they are."""


class PlainArgument(_PlainValues, TyperArgument):
    """An argument whose plain values are taken as they are."""


_PLAIN: dict[type, Any] = {TyperOption: PlainOption, TyperArgument: PlainArgument}


class PlainParameters:
    """A command of typer whose parameters take plain values as they are."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the same parameters at every call: typer distinguishes them by identity."""
        self.params = [_plain(each) for each in getattr(self, "params", ())]
        return super().get_params(ctx)  # type: ignore[misc]

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option `--help`, which typer adds by itself."""
        self._help_option = _plain(super().get_help_option(ctx))  # type: ignore[misc]
        return self._help_option


def _plain(parameter: Any) -> Any:
    """Return a parameter as one whose plain values are taken as they are."""
    kind = _PLAIN.get(type(parameter))
    if kind is None:
        return parameter
    made = kind.__new__(kind)
    vars(made).update(vars(parameter))
    return made


def _is_plain(value: Any, kind: Any) -> bool:
    """Return whether a value, as typed, is what a declared type makes of it."""
    if value is None:
        return True
    if kind == list[str]:
        return isinstance(value, (list, tuple)) and all(_is_plain(each, str) for each in value)
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind in (bool, int, float):
        return type(value) is kind  # a default, as what is typed is a text
    return kind is str and isinstance(value, str) and printable(value) == value
