"""Options that commands share, and how a dataclass of options becomes a command.

A command is a function of one dataclass whose fields are its options, and the terminal it talks to:

    @command
    def generate(options: GenerateOptions, terminal: Terminal) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

from typer import Argument, Option
from typer.core import TyperCommand, TyperOption

from kvtool.cli.plain_values import PlainParameters
from kvtool.cli.terminal import Terminal, open_terminal
from kvtool.documents.files import check_writable, expand
from kvtool.errors import UsageError
from kvtool.policies.allocate.table import ALLOCATORS
from kvtool.sizes import LARGEST_SEED

if TYPE_CHECKING:
    from kvtool.calls.settings import PromptSettings

Format = Literal["text", "json", "yaml"]
Settings = TypeVar("Settings", bound="PromptSettings")
_SUFFIXES: dict[str, Format] = {
    ".json": "json",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".txt": "text",
}


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where the data goes, in which form, and how much is said beside it."""

    output: Annotated[
        str | None,
        Option(
            "--output", "-o", metavar="PATH|-", help="Write the data here, whole or not at all."
        ),
    ] = None
    format: Annotated[
        Format | None,
        Option("--format", "-f", help="Form of the data.  [default: by the suffix of --output]"),
    ] = None
    quiet: Annotated[bool, Option("--quiet", "-q", help="Say nothing but errors.")] = False
    progress: Annotated[
        bool | None,
        Option("--progress/--no-progress", help="Progress bars.  [default: on a terminal]"),
    ] = None
    debug: Annotated[bool, Option("--debug", help="Show the traceback of an error.")] = False

    @property
    def output_path(self) -> Path | None:
        """The file to write, or None for stdout."""
        return None if self.output in (None, "-") else expand(self.output)

    def check_output(self) -> None:
        """Refuse an output file that could not be written at the end."""
        if self.output_path is not None:
            check_writable(self.output_path, "--output")

    def choose_format(self, otherwise: Format) -> Format:
        """Return the format asked for by name or by suffix."""
        suffix = self.output_path.suffix.lower() if self.output_path else ""
        return self.format or _SUFFIXES.get(suffix, otherwise)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OutputOptions):
    """Which model runs, and on what."""

    model: Annotated[
        str | None,
        Option("--model", "-m", metavar="ID|DIR", help="Model.  [default: the bundled reference]"),
    ] = None
    revision: Annotated[
        str | None,
        Option("--revision", metavar="REV", help="Branch, tag or commit of a model on the hub."),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"] | None,
        Option(
            "--dtype", help="auto: the checkpoint's on a GPU, float32 on a CPU.  [default: auto]"
        ),
    ] = None
    device: Annotated[
        str | None,
        Option(
            "--device", metavar="auto|cpu|cuda[:i]", help="Where the model runs.  [default: auto]"
        ),
    ] = None
    device_map: Annotated[
        str | None,
        Option(
            "--device-map",
            metavar="MAP",
            help="Spread layers over devices, as in transformers (auto ..).",
        ),
    ] = None
    attn_implementation: Annotated[
        Literal["auto", "eager", "sdpa", "flash_attention_2"] | None,
        Option("--attn-implementation", help="Attention kernel.  [default: auto]"),
    ] = None
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run code that comes with the checkpoint.")
    ] = False
    seed: Annotated[
        int | None,
        Option(
            "--seed",
            min=0,
            max=LARGEST_SEED,
            metavar="N",
            help="Seed of everything random.  [default: 0]",
        ),
    ] = None
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print the resolved configuration and stop.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(ModelOptions):
    """A recipe or a plan, over which flags and then `--set` are laid."""

    recipe: Annotated[
        str | None,
        Argument(
            metavar="[RECIPE|PLAN|-]", help="A recipe, or a plan of kvtool plan-budget; - stdin."
        ),
    ] = None
    allocator: Annotated[
        str | None,
        Option(
            "--allocator",
            metavar="NAME",
            help=f"Split the budget over layers: {', '.join(ALLOCATORS)}.",
        ),
    ] = None
    tensor_parallel: Annotated[
        bool | None,
        Option(
            "--tensor-parallel",
            help="Split every layer over the processes that torchrun started.",
        ),
    ] = None
    set: Annotated[
        list[str],
        Option("--set", "-s", metavar="KEY=VALUE", help="Set a key of the recipe, last of all."),
    ] = field(default_factory=list)
    unset: Annotated[
        list[str], Option("--unset", metavar="KEY", help="Remove a key of the recipe.")
    ] = field(default_factory=list)

    def settings(self, kind: type[Settings]) -> Settings:
        """Return what the library calls are asked to do: the options of the same names."""
        names = (each.name for each in fields(kind) if hasattr(self, each.name))
        return kind(**{name: getattr(self, name) for name in names})


def _check_policies(options: Any) -> None:
    """Refuse a policy that is misspelled before anything else is imported."""
    given = getattr(options, "policy", None)
    if given:
        from kvtool.policies.grammar import check_policies

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


def command(function: Callable[[Any, Terminal], None]) -> Callable[..., None]:
    """Give typer one parameter per field of the options, a command's own before the shared ones."""
    options_type = get_type_hints(function)["options"]
    hints = get_type_hints(options_type, include_extras=True)
    defaults = {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in fields(options_type)
    }
    names = [
        name for base in options_type.__mro__ for name in vars(base).get("__annotations__", ())
    ]

    def run(**values: Any) -> None:
        options = options_type(**values)
        _check_policies(options)
        with open_terminal(quiet=options.quiet, progress=options.progress) as terminal:
            function(options, terminal)

    typed: Any = functools.wraps(function)(run)
    typed.__signature__ = inspect.Signature(
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hints[name]
            )
            for name in dict.fromkeys(names)
        ]
    )
    typed.__annotations__ = {}
    return typed
