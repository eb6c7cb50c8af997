"""The command `kvtool`: its subcommands, and what a failure looks like."""

from __future__ import annotations

import errno
import gc
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from kvtool.cli.plain_values import PlainParameters
from kvtool.cli.terminal import ReaderGone, fill_closed_streams, tell
from kvtool.errors import (
    KvtoolError,
    KvtoolWarning,
    did_you_mean,
    in_one_line,
    is_out_of_memory,
)
from kvtool.garbage import collect_seldom
from kvtool.version import VERSION

COMMANDS = {
    "generate": "generate:generate",
    "compress": "compress:compress",
    "policies": "policies:policies",
    "profile": "profile:profile",
    "plan-budget": "plan_budget:plan_budget",
    "eval": "eval:evaluate",
    "serve": "serve:serve",
    "convert": "convert:convert",
    "export": "export:export",
}
"""Every command and its function, whose file is imported once it is run or its help is shown."""

_WHOLE = 1000  # characters of a sentence, so that none is cut


class Commands(PlainParameters, TyperGroup):
    """The commands by name."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [
            (name, self.get_command(ctx, name).get_short_help_str(limit=_WHOLE))
            for name in COMMANDS
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        from kvtool.cli.options import OneOfEach, command

        file, _, function = COMMANDS[cmd_name].partition(":")
        one = typer.Typer(rich_markup_mode=None, add_completion=False)
        run = command(getattr(import_module(f"kvtool.cli.{file}"), function))
        one.command(cmd_name, cls=OneOfEach)(run)
        return typer.main.get_command(one)


app = typer.Typer(
    name="kvtool",
    cls=Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Compress the KV cache of language models."""
    if version:
        typer.echo(f"kvtool {VERSION}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    collect_seldom()
    fill_closed_streams()
    code = main(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.stdout.flush()
    except OSError as error:  # which Python would report in its own words on its way out
        _forget_stdout()
        code = code or 1
        _tell(_explain(error))
    gc.freeze()  # nothing is left to collect one by one while the interpreter ends
    sys.exit(code)


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; a mistake is one line on stderr."""
    debug = "--debug" in arguments
    try:
        _check_docstrings()
        with warnings.catch_warnings(record=not debug) as caught:
            if not debug:
                warnings.simplefilter("ignore")
                warnings.simplefilter("once", KvtoolWarning)
            try:
                return app(list(arguments), prog_name="kvtool", standalone_mode=False) or 0
            finally:
                for each in caught or ():
                    tell(f"warning: {each.message}\n")
    except ReaderGone:
        _forget_stdout()
        return 141  # as a program that SIGPIPE ended
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if debug:
            raise
        mistake = _explain(error)
        _tell(mistake)
        return mistake.exit_code


def _check_docstrings() -> None:
    """Refuse `python -OO`, under which transformers fails and no command has a help."""
    if sys.flags.optimize > 1:
        raise KvtoolError(
            "python -OO (PYTHONOPTIMIZE=2) leaves out docstrings, which transformers needs",
            hint="python -O keeps them",
        )


def _explain(error: Exception) -> KvtoolError:
    """Return the mistake behind an exception; of an unforeseen one, what and where it is."""
    if isinstance(error, KvtoolError):
        return error
    if isinstance(error, typer.TyperException):
        return _explain_usage(error)
    if is_out_of_memory(error):
        return KvtoolError(
            "out of memory", hint="a smaller budget, --prefill block or --dtype bfloat16"
        )
    if isinstance(error, OSError):
        if error.errno == errno.EBADF and not error.filename:
            return KvtoolError("a standard stream is closed that the command reads or writes")
        place = f"`{error.filename}`: " if error.filename else ""
        return KvtoolError(f"{place}{error.strerror or error}")
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if "kvtool" in each.filename] or frames
    place = f"{ours[-1].filename}, line {ours[-1].lineno}"
    return KvtoolError(
        f"{in_one_line(error)} ({place})",
        hint="report it with the lines of --debug and of python -m kvtool --version",
    )


def _explain_usage(error: typer.TyperException) -> KvtoolError:
    """Put errors of typer and pydantic about the command line into our words."""
    param = getattr(error, "param", None)
    text = error.format_message()
    if param is not None and error.__cause__ is not None:
        from pydantic import ValidationError

        from kvtool.documents.source import first_mistake

        if isinstance(error.__cause__, ValidationError):
            text = f"{param.opts[0]}: {first_mistake(error.__cause__)}"
    message, _, suggestion = text.replace("'", "`").rstrip(".").partition(" Did you mean ")
    hint = f"did you mean {suggestion}" if suggestion else None
    unknown = re.fullmatch("No such command `(.*)`", message)
    if unknown and hint is None:
        hint = did_you_mean(unknown[1], COMMANDS)
    return KvtoolError(message[:1].lower() + message[1:], hint=hint, exit_code=error.exit_code)


def _tell(error: KvtoolError) -> None:
    rank = os.environ.get("RANK", "0")
    process = "" if rank == "0" else f"process {rank}: "
    lines = [f"{process}error: {error.report()}"]
    if error.hint:
        lines.append(f"hint: {' '.join(error.hint.split())}")
    tell("".join(f"{line}\n" for line in lines))


def _forget_stdout() -> None:
    """Let the interpreter flush nothing into the closed pipe on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    run()
