"""The settings of commands that read a prompt, each declared once with its flag."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvtool.calls.base_settings import MEMORY_HELP, RecipeSettings
from kvtool.documents.files import check_name, check_prompt, check_writable, expand
from kvtool.documents.settings import Flag, Template
from kvtool.engines.vllm.format import exported_path
from kvtool.errors import UsageError, quote
from kvtool.sizes import (
    DEFAULT_BLOCK,
    DEFAULT_NEW_TOKENS,
    DEFAULT_TOKENS,
    Budget,
    check_temperature,
    parse_count,
    parse_memory,
)

if TYPE_CHECKING:
    from kvtool.cache.whole.cache import KVCache
    from kvtool.documents.messages import Turns
    from kvtool.documents.prompts import PromptEntry
    from kvtool.policies.policy import Policy
else:
    KVCache = PromptEntry = Turns = Policy = Any

_NEEDLE_ANSWER_TOKENS = 8  # at most seven digits and a full stop


@dataclass(frozen=True, kw_only=True)
class CachedSettings(RecipeSettings):
    """The policy and budget of caches, and how prompts are read into them."""

    policy: Annotated[
        str | Policy | None,
        Flag(
            "--policy -p",
            metavar="POLICY",
            help="What to keep, e.g. h2o+caote; see `kvtool policies`. A score of your own: "
            "my_package.my_module:MyScore.",
            key="policy",
            env="KVTOOL_POLICY",
            after="chat_template",
        ),
    ] = None
    budget: Annotated[
        str | None,
        Flag(
            "--budget -b",
            metavar="SIZE",
            help="Tokens per layer and KV head (512, 4K), share of the prompt (20%), bytes "
            f"(64MiB), or auto: what is free.  [default: {DEFAULT_TOKENS}]",
            key="budget",
            env="KVTOOL_BUDGET",
            after="policy",
        ),
    ] = None
    prefill: Annotated[
        str | None,
        Flag(
            "--prefill",
            metavar="full|block[:M]",
            help=f"Read the prompt whole, or in blocks of M tokens ({DEFAULT_BLOCK}).",
            key="prefill",
            after="budget",
        ),
    ] = None

    def check(self) -> None:
        """Refuse settings that are wrong by themselves, without importing torch."""


@dataclass(frozen=True, kw_only=True)
class PromptSettings(CachedSettings):
    """A prompt, and the policy and budget of the cache it fills."""

    prompt: Annotated[
        str | None,
        Flag(
            "--prompt",
            metavar="TEXT",
            help="The prompt; with --prompt-file a question about the file.",
        ),
    ] = None
    prompt_file: Annotated[
        str | None,
        Flag("--prompt-file", metavar="FILE|-", help="Read the prompt from a UTF-8 file, - stdin."),
    ] = None
    system: Annotated[
        str | None,
        Flag("--system", metavar="TEXT", help="System message of the chat template."),
    ] = None
    chat_template: Annotated[
        Template,
        Flag(
            "--chat-template",
            help="Put what the user says into the model's chat template; off: as it stands.",
            counts=False,
        ),
    ] = "auto"
    save: Annotated[
        str | None,
        Flag("--save", metavar="CACHE.safetensors", help="Save the compressed cache here."),
    ] = None
    show: Annotated[
        str | None,
        Flag(
            "--show",
            metavar="FILE.html|-",
            help="Show which tokens each layer and head kept: a page, or - on this terminal.",
        ),
    ] = None

    @property
    def save_path(self) -> Path | None:
        """The cache file to write."""
        return None if self.save is None else expand(self.save)

    @property
    def show_path(self) -> Path | None:
        """The page of the kept text to write."""
        return None if self.show is None or self.show == "-" else expand(self.show)

    @property
    def template(self) -> Template:
        """Whether the prompt goes into the model's chat template."""
        return self.chat_template

    @property
    def continues(self) -> bool:
        """Whether a cache that holds a text is gone on from."""
        return False

    def as_shown(self) -> dict[str, Any]:
        """Return what a dry run prints as it was given."""
        names = ("system", "chat_template", "seed", "save", "show")
        return {name: getattr(self, name) for name in names}

    def check_output(self) -> None:
        """Refuse an output file that could not be written at the end, or that is the cache's."""
        super().check_output()
        for flag, path in (("--save", self.save), ("--show", self.show)):
            if path is not None and path != "-" and expand(path) == self.output_path:
                raise UsageError(f"{flag} and --output both write `{self.output_path}`")

    def check(self) -> None:
        self._check_show()
        size = None if self.budget is None else Budget.parse(self.budget)
        self.check_memory(used=size is not None and size.share is not None)
        if self.system is None:
            return
        check_prompt(self.system, "--system")
        if self.template == "off":
            raise UsageError("--system goes into the chat template, and --chat-template is off")
        if self.continues:
            raise UsageError("--system goes before everything, and --cache holds a text already")

    def _check_show(self) -> None:
        if self.show_path is None:
            return
        if self.show_path.suffix.lower() not in (".html", ".htm"):
            raise UsageError(
                f"--show writes a page or, with -, to the terminal, got {quote(self.show)}",
                hint="--show kept.html",
            )
        if self.show_path == self.save_path:
            raise UsageError(f"--save and --show both write `{self.show_path}`")

    def check_paths(self) -> None:
        """Refuse files that could not be written at the end."""
        for path, option in ((self.save_path, "--save"), (self.show_path, "--show")):
            if path is not None:
                check_writable(path, option)


@dataclass(frozen=True, kw_only=True)
class CompressionSettings(PromptSettings):
    """A prompt that is read once.

    Attributes:
        max_new_tokens: that will be generated from its cache, questions included.
        export_vllm: a folder of exported caches, to which this one goes as well.
    """

    max_new_tokens: Annotated[
        str | int | None,
        Flag(
            "--max-new-tokens -n",
            metavar="N",
            help="Read the prompt for a text that goes on for N tokens, questions included; only "
            "models whose RoPE depends on the length (longrope, dynamic) differ.  [default: 0]",
        ),
    ] = None
    export_vllm: Annotated[
        str | None,
        Flag(
            "--export-vllm",
            metavar="FOLDER",
            help="Export the cache to this folder as well, for vLLM; see kvtool export.",
        ),
    ] = None

    @property
    def export_path(self) -> Path | None:
        """The exported file to write, named after the cache file."""
        if self.export_vllm is None or self.save_path is None:
            return None
        return exported_path(expand(self.export_vllm), self.save_path)

    @property
    def new_tokens(self) -> int:
        """How many tokens may follow the prompt; 0 where no caller has said so."""
        return 0 if self.max_new_tokens is None else parse_count(self.max_new_tokens)

    def check(self) -> None:
        super().check()
        if self.new_tokens < 0:
            raise UsageError(f"--max-new-tokens must be 0 or more, got {self.max_new_tokens}")
        if self.export_vllm is not None and self.save is None:
            raise UsageError(
                "--export-vllm names its file after the cache", hint="--save book.kv.safetensors"
            )

    def check_paths(self) -> None:
        super().check_paths()
        if self.export_path is not None:
            check_writable(self.export_path, "--export-vllm")
            if self.save_path is not None and self.export_path == self.save_path:
                raise UsageError(f"--save and --export-vllm both write `{self.save_path}`")


@dataclass(frozen=True, kw_only=True)
class GenerationSettings(PromptSettings):
    """What is generated, and how: an answer, a conversation, or the answers to many prompts.

    Attributes:
        turns: of a conversation: their file (`-` is stdin), or turns that were read.
        prompts: many: their file (`-` is stdin), or prompts that were read.
        memory: of the rows in flight, such as `8GiB`; None: half of what is free, of 64 rows at
            most.
        skip_bad: whether a prompt that cannot be answered leaves the others alone.
        cache: to go on from: its file, or the cache.
    """

    turns: Annotated[
        str | Turns | None,
        Flag(
            "--turns",
            metavar="FILE|-",
            help="Answer the user's turns, one a line (text or JSON Lines) or messages in a JSON "
            "array, after the prompt.",
        ),
    ] = None
    prompts: Annotated[
        str | list[PromptEntry] | None,
        Flag(
            "--prompts",
            metavar="FILE.jsonl|-",
            help="Answer many prompts, one a line of JSON, several at a time.",
            python=None,
        ),
    ] = None
    memory: Annotated[
        str | None,
        Flag(
            "--memory",
            metavar="BYTES",
            help="Run as many of --prompts at a time as fit this cache (8GiB).  [default: half of "
            "what is free, up to 64]",
            python=None,
        ),
    ] = None
    device_memory: Annotated[
        str | None,
        Flag(
            "--device-memory",
            metavar="SIZE",
            help=f"{MEMORY_HELP[:-1]}; without --prompts also --memory]",
            counts=False,
        ),
    ] = None
    skip_bad: Annotated[
        bool,
        Flag(
            "--skip-bad",
            help="Answer the other --prompts where one cannot be answered, and end with code 4.",
            python=None,
        ),
    ] = False
    overwrite: Annotated[
        bool,
        Flag(
            "--overwrite",
            help="Answer --prompts anew whose answers are in --output.",
            python=None,
            counts=False,
        ),
    ] = False
    cache: Annotated[
        str | KVCache | None,
        Flag("--cache", metavar="CACHE.safetensors", help="Go on from this saved cache."),
    ] = None
    max_new_tokens: Annotated[
        str | int | None,
        Flag(
            "--max-new-tokens -n",
            metavar="N",
            help=f"Stop after N new tokens.  [default: {DEFAULT_NEW_TOKENS}]",
            key="generation.max_new_tokens",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        Flag(
            "--temperature",
            metavar="T",
            help="0 takes the likeliest token, above 0 samples.  [default: 0]",
            key="generation.temperature",
        ),
    ] = None
    stop: Annotated[
        list[str],
        Flag(
            "--stop",
            metavar="TEXT",
            help="End where this text comes up; it stays.",
            key="generation.stop",
        ),
    ] = field(default_factory=list)
    stream: Annotated[
        bool | None,
        Flag(
            "--stream/--no-stream",
            help="Print text as it comes.  [default: on a terminal]",
            python=None,
            counts=False,
        ),
    ] = None
    compare_full: Annotated[
        bool, Flag("--compare-full", help="Measure how close the run stays to a full cache.")
    ] = False
    compile: Annotated[
        bool | None,
        Flag(
            "--compile/--no-compile",
            help="Decode through torch.compile.  [default: from 1536 new tokens on, on CUDA]",
        ),
    ] = None

    @property
    def continues(self) -> bool:
        return self.cache is not None

    @property
    def cache_path(self) -> Path | None:
        """The cache file to start from."""
        return expand(self.cache) if isinstance(self.cache, str) else None

    @property
    def wants_needle(self) -> bool:
        """Whether the built-in prompt is asked for, by giving none."""
        given = (self.prompt, self.prompt_file, self.turns, self.prompts, self.cache)
        return all(each is None for each in given)

    @property
    def new_tokens(self) -> int:
        """How many tokens to generate at most."""
        if self.max_new_tokens is None:
            return _NEEDLE_ANSWER_TOKENS if self.wants_needle else DEFAULT_NEW_TOKENS
        return parse_count(self.max_new_tokens)

    @property
    def memory_bytes(self) -> int | None:
        """The bytes of the rows in flight."""
        return None if self.memory is None else parse_memory(self.memory)

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
        super().check()
        if self.new_tokens < 1:
            raise UsageError(f"--max-new-tokens must be 1 or more, got {self.max_new_tokens}")
        if self.temperature is not None:
            check_temperature(self.temperature, "--temperature")
        if "" in self.stop:
            raise UsageError("--stop is empty, and every text holds that", hint="--stop TEXT")
        if self.cache_path is not None:
            check_name(self.cache_path, "--cache")
            if self.cache_path.is_dir():
                raise UsageError(
                    f"cache file `{self.cache}` is a folder", hint="give the file in it"
                )
            if not self.cache_path.is_file():
                raise UsageError(f"cache file `{self.cache}` does not exist")
        if self.prompts is not None:
            self._check_prompts()
        elif None not in (self.turns, self.prompt, self.prompt_file):
            raise UsageError(
                "--prompt, --prompt-file and --turns do not go together: the first turn goes on "
                "with the prompt",
                hint="put the question into the first line of --turns",
            )

    def _check_prompts(self) -> None:
        names = ("prompt", "prompt_file", "turns", "cache", "save", "show", "compare_full")
        if self.budget is not None and Budget.parse(self.budget).share is not None:
            raise UsageError(
                f"-b {self.budget} goes with one prompt; --prompts share --memory",
                hint="-b in tokens or a share of each prompt",
            )
        for name in (*names, "compile", "tensor_parallel"):
            if getattr(self, name) not in (None, False):
                raise UsageError(f"--prompts and --{name.replace('_', '-')} exclude each other")
        if self.memory_bytes == 0:
            raise UsageError("--memory must hold something, got 0")
