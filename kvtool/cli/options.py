"""Make a command of a dataclass of settings.

A command is a function of one dataclass whose fields are its settings, and the terminal it talks
to:

    @command
    def generate(options: GenerationSettings, terminal: Terminal) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_type_hints

from typer import Argument, Context, Option
from typer.core import TyperCommand, TyperOption

from kvtool.cli.help import write_examples, write_options
from kvtool.cli.plain_values import PlainParameters
from kvtool.cli.terminal import Terminal, open_terminal
from kvtool.documents.settings import Flag, Setting, settings_of
from kvtool.errors import UsageError
from kvtool.policies.grammar import check_policies
from kvtool.policies.table import BASES, MODIFIERS
from kvtool.sizes import AUTO


def _check_policies(options: Any) -> None:
    """Refuse a policy that is misspelled before anything else is imported."""
    given = getattr(options, "policy", None)
    if given and not getattr(options, "chooses", False):
        check_policies([given] if isinstance(given, str) else given)


class OneOfEach(PlainParameters, TyperCommand):
    """A command that refuses an option given twice, where it would take the last one only."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        order = self.make_parser(ctx).parse_args(args=list(args))[2] if args else []
        for option in {id(each): each for each in order}.values():
            single = isinstance(option, TyperOption) and not (option.is_flag or option.multiple)
            if single and sum(each is option for each in order) > 1:
                raise UsageError(f"{option.opts[0]} is given twice, and takes one value")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_options(self.get_params(ctx), ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(str(ctx.info_name), self.get_params(ctx), formatter)


def _fitting(
    values: dict[str, Any], environment: Sequence[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return values without those of the environment that others make void, and the names left."""
    void: set[str] = set()
    if values.get("rescore"):
        void.update(environment)
    if isinstance(values.get("cache"), str):
        void |= {"policy", "budget"}
    if values.get("profile") or (values.get("file") and "to" in values):  # which name their model
        void.add("model")
    if values.get("device_map"):
        void.add("device")
    chosen = values.get("policy") == AUTO
    if chosen or not (values.get("policy") or values.get("recipe")):
        void.add("budget")
    void &= {*environment}
    plain: dict[str, Any] = {name: [] if isinstance(values[name], list) else None for name in void}
    return values | plain, tuple(name for name in environment if name not in void)


def command(function: Callable[[Any, Terminal], None]) -> Callable[..., None]:
    """Give typer one parameter per field of the options, a command's own before the shared ones."""
    options_type = get_type_hints(function)["options"]

    def run(invocation: Context, **values: Any) -> None:
        sources = {name: invocation.get_parameter_source(name) for name in values}
        environment = [
            name
            for name, source in sources.items()
            if source is not None and source.name == "ENVIRONMENT"
        ]
        values, names = _fitting(values, environment)
        if names:
            values["environment"] = names
        options = options_type(**values)
        _check_policies(options)
        with open_terminal(quiet=options.quiet, progress=options.progress) as terminal:
            function(options, terminal)

    typed: Any = functools.wraps(function)(run)
    context = inspect.Parameter("invocation", inspect.Parameter.KEYWORD_ONLY, annotation=Context)
    typed.__signature__ = inspect.Signature(
        [context, *(_parameter(each) for each in in_order(options_type))]
    )
    typed.__annotations__ = {}
    return typed


def in_order(options_type: type) -> list[Setting]:
    """Return settings as a help lists them: a command's own before those it shares."""
    found = {each.name: each for each in settings_of(options_type)}
    names = [
        name for base in options_type.__mro__ for name in vars(base).get("__annotations__", ())
    ]
    names = [name for name in dict.fromkeys(names) if name in found]
    for name in [name for name in names if found[name].flag.after in names]:
        names.remove(name)
        names.insert(names.index(str(found[name].flag.after)) + 1, name)
    return [found[name] for name in names]


def _parameter(setting: Setting) -> inspect.Parameter:
    """Return a setting as typer reads it."""
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=setting.default,
        annotation=Annotated[setting.typed, _option(setting.name, setting.flag)],
    )


def _option(name: str, flag: Flag) -> Any:
    if not flag.names:
        return Argument(metavar=flag.metavar, help=flag.help)
    return Option(
        *flag.names.split(),
        metavar=flag.metavar,
        help=flag.help,
        min=flag.min,
        max=flag.max,
        envvar=flag.env,
        autocompletion=COMPLETIONS.get(name),
    )


# ---- names that a shell completes, without importing torch


def complete_policies(incomplete: str) -> list[str]:
    """Return policies that begin as typed: `h2o,sn`, `h2o+ca`."""
    before, last = _parted(r"(.*[,+])?(.*)", incomplete)
    names = MODIFIERS if before.endswith("+") else BASES
    return [f"{before}{name}" for name in names if name.startswith(last)]


def complete_tasks(incomplete: str) -> list[str]:
    """Return tasks that begin as typed: `niah,ru`."""
    from kvtool.evaluation.tasks.table import TASKS

    before, last = _parted(r"(.*,)?(.*)", incomplete)
    return [f"{before}{name}" for name in TASKS if name.startswith(last)]


def _parted(pattern: str, text: str) -> tuple[str, str]:
    found = re.fullmatch(pattern, text, re.DOTALL)
    return (found[1] or "", found[2]) if found else ("", text)


COMPLETIONS = {"policy": complete_policies, "tasks": complete_tasks}
"""What completes an option, by its setting."""
