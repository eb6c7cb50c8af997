"""Options of commands that read a prompt into a cache: `generate` and `compress`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from typer import Option

from kvtool.cli.options import RecipeOptions
from kvtool.documents.files import expand
from kvtool.errors import UsageError
from kvtool.sizes import DEFAULT_BLOCK, DEFAULT_TOKENS


@dataclass(frozen=True, kw_only=True)
class PromptOptions(RecipeOptions):
    """A prompt, and the policy and budget of the cache it fills."""

    prompt: Annotated[str | None, Option("--prompt", metavar="TEXT", help="The prompt.")] = None
    prompt_file: Annotated[
        str | None,
        Option(
            "--prompt-file", metavar="FILE|-", help="Read the prompt from a UTF-8 file, - stdin."
        ),
    ] = None
    system: Annotated[
        str | None,
        Option("--system", metavar="TEXT", help="System message of the chat template."),
    ] = None
    chat_template: Annotated[
        Literal["auto", "on", "off"],
        Option(
            "--chat-template",
            help="Put what the user says into the model's chat template; off: as it stands.",
        ),
    ] = "auto"
    policy: Annotated[
        str | None,
        Option(
            "--policy",
            "-p",
            metavar="POLICY",
            help="What to keep, e.g. h2o+caote; see `kvtool policies`. A score of your own: "
            "my_package.my_module:MyScore.",
        ),
    ] = None
    budget: Annotated[
        str | None,
        Option(
            "--budget",
            "-b",
            metavar="SIZE",
            help="Tokens per layer and KV head (512, 4K), share of the prompt (20%) or bytes "
            f"(64MiB).  [default: {DEFAULT_TOKENS}]",
        ),
    ] = None
    prefill: Annotated[
        str | None,
        Option(
            "--prefill",
            metavar="full|block[:M]",
            help=f"Read the prompt whole, or in blocks of M tokens ({DEFAULT_BLOCK}).",
        ),
    ] = None
    save: Annotated[
        str | None,
        Option("--save", metavar="CACHE.safetensors", help="Save the compressed cache here."),
    ] = None
    show: Annotated[
        str | None,
        Option(
            "--show",
            metavar="FILE.html|-",
            help="Show which tokens each layer and head kept: a page, or - on this terminal.",
        ),
    ] = None

    def check_output(self) -> None:
        """Refuse an output file that could not be written at the end, or that is the cache's."""
        super().check_output()
        for flag, path in (("--save", self.save), ("--show", self.show)):
            if path not in (None, "-") and expand(path) == self.output_path:
                raise UsageError(f"{flag} and --output both write `{self.output_path}`")
