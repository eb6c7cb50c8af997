"""Options of `kvtool generate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from typer import Option

from kvtool.cli.prompt_options import PromptOptions
from kvtool.sizes import DEFAULT_NEW_TOKENS


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
    prompts: Annotated[
        str | None,
        Option(
            "--prompts",
            metavar="FILE.jsonl|-",
            help="Answer many prompts, one a line of JSON, several at a time.",
        ),
    ] = None
    memory: Annotated[
        str | None,
        Option(
            "--memory",
            metavar="BYTES",
            help="Run as many of --prompts at a time as fit this cache (8GiB).  [default: half of "
            "what is free, up to 64]",
        ),
    ] = None
    skip_bad: Annotated[
        bool,
        Option(
            "--skip-bad",
            help="Answer the other --prompts where one cannot be answered, and end with code 4.",
        ),
    ] = False
    overwrite: Annotated[
        bool,
        Option("--overwrite", help="Answer --prompts anew whose answers are in --output."),
    ] = False
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
            help=f"Stop after N new tokens.  [default: {DEFAULT_NEW_TOKENS}]",
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
