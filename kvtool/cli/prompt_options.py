"""Options of commands that read a prompt into a cache: `generate` and `compress`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from kvtool.cli.options import RecipeOptions
from kvtool.documents.files import check_writable
from kvtool.documents.prompts import check_prompt
from kvtool.documents.reading import expand
from kvtool.errors import UsageError
from kvtool.models.folder import check_folder
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

    def check_system(self) -> None:
        """Refuse a system message that has no place, without importing torch."""
        if self.system is None:
            return
        check_prompt(self.system, "--system")
        if self.chat_template == "off":
            raise UsageError("--system goes into the chat template, and --chat-template is off")
        if getattr(self, "cache", None) is not None:
            raise UsageError("--system goes before everything, and --cache holds a text already")

    @property
    def save_path(self) -> Path | None:
        """The cache file to write."""
        return None if self.save is None else expand(self.save)


def check_paths(options: PromptOptions) -> None:
    """Refuse files and folders that are not there, without importing torch."""
    options.check_output()
    if options.save_path is not None:
        check_writable(options.save_path, "--save")
        if options.output_path is not None and options.save_path == options.output_path:
            raise UsageError(f"--save and --output both write `{options.save_path}`")
    check_folder(options.model)
