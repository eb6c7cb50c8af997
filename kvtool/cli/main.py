"""The command `kvtool`: its subcommands, and what a failure looks like."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer
from pydantic import ValidationError

from kvtool.cli.compress import compress
from kvtool.cli.eval import evaluate
from kvtool.cli.generate import generate
from kvtool.cli.options import OneOfEach, command
from kvtool.cli.plan_budget import plan_budget
from kvtool.cli.policies import policies
from kvtool.cli.profile import profile
from kvtool.cli.terminal import ReaderGone, tell
from kvtool.documents.validation import first_mistake
from kvtool.errors import KvtoolError, did_you_mean
from kvtool.version import VERSION

app = typer.Typer(
    name="kvtool",
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


COMMANDS = (
    ("generate", generate),
    ("compress", compress),
    ("policies", policies),
    ("profile", profile),
    ("plan-budget", plan_budget),
    ("eval", evaluate),
)
for name, function in COMMANDS:
    app.command(name, cls=OneOfEach)(command(function))


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    sys.exit(main(sys.argv[1:] if arguments is None else arguments))


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; a mistake is one line on stderr."""
    debug = "--debug" in arguments
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.simplefilter("ignore")
            return app(list(arguments), prog_name="kvtool", standalone_mode=False) or 0
    except ReaderGone:
        _forget_stdout()
        return 141  # as a program that SIGPIPE ended
    except KeyboardInterrupt:
        return 130
    except (KvtoolError, typer.TyperException, OSError, MemoryError, RuntimeError) as error:
        told = _explain(error)
        if told is None or debug:
            raise
        _tell(told)
        return told.exit_code


def _explain(error: Exception) -> KvtoolError | None:
    """Return the mistake behind an exception, or None for a bug, which keeps its traceback."""
    if isinstance(error, KvtoolError):
        return error
    if isinstance(error, typer.TyperException):
        return _explain_usage(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return KvtoolError(
            "out of memory", hint="a smaller budget, --prefill block or --dtype bfloat16"
        )
    if isinstance(error, OSError):
        place = f"`{error.filename}`: " if error.filename else ""
        return KvtoolError(f"{place}{error.strerror or error}")
    return None


def _explain_usage(error: typer.TyperException) -> KvtoolError:
    """Tell in our words what typer and pydantic say of the command line."""
    param = getattr(error, "param", None)
    if param is not None and isinstance(error.__cause__, ValidationError):
        text = f"{param.opts[0]}: {first_mistake(error.__cause__)}"
    else:
        text = error.format_message()
    message, _, suggestion = text.replace("'", "`").rstrip(".").partition(" Did you mean ")
    hint = f"did you mean {suggestion}" if suggestion else None
    unknown = re.fullmatch("No such command `(.*)`", message)
    if unknown and hint is None:
        hint = did_you_mean(unknown[1], [name for name, _ in COMMANDS])
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
