"""Options of `kvtool generate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from kvtool.cli.prompt_options import PromptOptions
from kvtool.documents.files import check_name
from kvtool.documents.reading import expand
from kvtool.errors import UsageError
from kvtool.sizes import check_temperature, parse_count

_NEW_TOKENS = 128
_NEEDLE_ANSWER_TOKENS = 8  # at most seven digits and a full stop


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(PromptOptions):
    """Options of `kvtool generate`."""

    turns: Annotated[
        str | None,
        Option(
            "--turns",
            metavar="FILE|-",
            help="Answer the user's turns, one a line (text or JSON Lines) or messages in a JSON "
            "array, after the prompt.",
        ),
    ] = None
    cache: Annotated[
        str | None,
        Option("--cache", metavar="CACHE.safetensors", help="Go on from this saved cache."),
    ] = None
    max_new_tokens: Annotated[
        str | None,
        Option(
            "--max-new-tokens",
            "-n",
            metavar="N",
            help=f"Stop after N new tokens.  [default: {_NEW_TOKENS}]",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        Option(
            "--temperature",
            metavar="T",
            help="0 takes the likeliest token, above 0 samples.  [default: 0]",
        ),
    ] = None
    stop: Annotated[
        list[str],
        Option("--stop", metavar="TEXT", help="End where this text comes up; it stays."),
    ] = field(default_factory=list)
    stream: Annotated[
        bool | None,
        Option("--stream/--no-stream", help="Print text as it comes.  [default: on a terminal]"),
    ] = None
    compare_full: Annotated[
        bool, Option("--compare-full", help="Measure how close the run stays to a full cache.")
    ] = False
    compile: Annotated[
        bool | None,
        Option(
            "--compile/--no-compile",
            help="Decode through torch.compile.  [default: from 1024 new tokens on, on CUDA]",
        ),
    ] = None

    @property
    def cache_path(self) -> Path | None:
        """The cache file to start from."""
        return None if self.cache is None else expand(self.cache)

    @property
    def wants_needle(self) -> bool:
        """Whether the built-in prompt is asked for, by giving none."""
        given = (self.prompt, self.prompt_file, self.turns, self.cache)
        return all(each is None for each in given)

    @property
    def new_tokens(self) -> int:
        """How many tokens to generate at most."""
        if self.max_new_tokens is None:
            return _NEEDLE_ANSWER_TOKENS if self.wants_needle else _NEW_TOKENS
        return parse_count(self.max_new_tokens)

    def drawing(self, turn: int = 0) -> dict[str, Any]:
        """Return how answers are drawn, each turn from a seed of its own."""
        return {
            "max_new_tokens": self.new_tokens,
            "temperature": self.temperature,
            "seed": (self.seed or 0) + turn,
            "stop": self.stop,
            "compare_full": self.compare_full,
            "compiled": self.compile,
        }

    def check(self) -> None:
        """Refuse options that are wrong by themselves."""
        self.check_system()
        if self.new_tokens < 1:
            raise UsageError(f"--max-new-tokens must be 1 or more, got {self.max_new_tokens}")
        if self.temperature is not None:
            check_temperature(self.temperature, "--temperature")
        if "" in self.stop:
            raise UsageError("--stop is empty, and every text holds that", hint="--stop TEXT")
        if self.cache_path is not None:
            check_name(self.cache_path, "--cache")
        if self.cache_path is not None and self.cache_path.is_dir():
            raise UsageError(f"cache file `{self.cache}` is a folder", hint="give the file in it")
        if self.cache_path is not None and not self.cache_path.is_file():
            raise UsageError(f"cache file `{self.cache}` does not exist")
