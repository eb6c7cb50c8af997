"""The settings of commands that read a prompt, each declared once with its flag."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.calls.base_settings import (
    MEMORY_HELP,
    DecodingSettings,
    RecipeSettings,
    at_least,
    check_cache_file,
)
from kvtool.documents.files import check_prompt, expand
from kvtool.documents.settings import Template, flag
from kvtool.engines.targets import SUFFIXES, Engine
from kvtool.engines.vllm.format import exported_path
from kvtool.errors import UsageError, quote
from kvtool.sizes import (
    AUTO,
    DEFAULT_BLOCK,
    DEFAULT_NEW_TOKENS,
    DEFAULT_TOKENS,
    DEVICE_BLOCKS,
    Budget,
    check_temperature,
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

    policy: str | Policy | None = flag(
        "--policy -p=POLICY",
        "What to keep, e.g. h2o+caote; see `kvtool policies`. auto: what loses least in the "
        "memory that is free. A score of your own: my_package.my_module:MyScore.",
        key="policy",
        env="KVTOOL_POLICY",
        after="chat_template",
    )
    budget: str | None = flag(
        "--budget -b=SIZE",
        "Tokens per layer and KV head (512, 4K), share of the prompt (20%), bytes "
        f"(64MiB), or auto: what is free.  [default: {DEFAULT_TOKENS}]",
        key="budget",
        env="KVTOOL_BUDGET",
        after="policy",
    )
    prefill: str | None = flag(
        "--prefill=full|block[:M]",
        f"Read the prompt whole, or in blocks of M tokens ({DEFAULT_BLOCK}; on CUDA "
        f"{DEVICE_BLOCKS['cuda']}; kvzip 512).",
        key="prefill",
        after="budget",
    )

    @property
    def size(self) -> Budget | None:
        """The budget that is given."""
        return None if self.budget is None else Budget.parse(self.budget)

    @property
    def chooses(self) -> bool:
        """Whether the policy is left to the memory and the prompt."""
        return isinstance(self.policy, str) and self.policy.strip().lower() == AUTO

    def check(self) -> None:
        """Refuse settings that are wrong by themselves, without importing torch."""

    def check_no_share(self) -> None:
        """Refuse a share of the memory as the budget of many prompts, which share one anyway."""
        if self.size is not None and self.size.share is not None:
            hint = "-b in tokens or bytes, or a share of each prompt"
            raise UsageError(f"-b {self.budget} goes with one prompt", hint=hint)


@dataclass(frozen=True, kw_only=True)
class PromptSettings(CachedSettings):
    """A prompt, and the policy and budget of the cache it fills."""

    prompt: str | None = flag(
        "--prompt=TEXT", "The prompt; with --prompt-file a question about the file."
    )
    prompt_file: str | None = flag(
        "--prompt-file=FILE|-", "Read the prompt from a UTF-8 file, - stdin."
    )
    system: str | None = flag("--system=TEXT", "System message of the chat template.")
    chat_template: Template = flag(
        "--chat-template",
        "Put what the user says into the model's chat template; off: as it stands.",
        counts=False,
        default="auto",
    )
    save: str | None = flag("--save=CACHE.safetensors", "Save the compressed cache here.")
    show: str | None = flag(
        "--show=FILE.html|-",
        "Show which tokens each layer and head kept: a page, or - on this terminal.",
    )

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

    def outputs(self) -> dict[str, Path | None]:
        return {"--save": self.save_path, "--show": self.show_path, **super().outputs()}

    def check(self) -> None:
        if self.show_path is not None and self.show_path.suffix.lower() not in (".html", ".htm"):
            raise UsageError(
                f"--show writes a page or, with -, to the terminal, got {quote(self.show)}",
                hint="--show kept.html",
            )
        shared = self.size is not None and self.size.share is not None
        self.check_memory(used=shared or self.chooses)
        if self.system is None:
            return
        check_prompt(self.system, "--system")
        if self.template == "off":
            raise UsageError("--system goes into the chat template, and --chat-template is off")
        if self.continues:
            raise UsageError("--system goes before everything, and --cache holds a text already")


@dataclass(frozen=True, kw_only=True)
class CompressionSettings(PromptSettings):
    """A prompt that is read once.

    Attributes:
        max_new_tokens: that will be generated from its cache, questions included.
        export_vllm, export_llamacpp: folders of exported caches, to which this one goes as well, or
            alone.
    """

    max_new_tokens: str | int | None = flag(
        "--max-new-tokens -n=N",
        "Read the prompt for a text that goes on for N tokens, questions included; only "
        "models whose RoPE depends on the length (longrope, dynamic) differ.  [default: 0]",
    )
    export_vllm: str | None = flag(
        "--export-vllm=FOLDER",
        "Export the cache to this folder, for vLLM, under the name of --save or --prompt-file; see "
        "kvtool export.",
    )
    export_llamacpp: str | None = flag(
        "--export-llamacpp=FOLDER", "The same for the newest llama.cpp, in f16."
    )

    @property
    def export_paths(self) -> dict[Engine, Path]:
        """Exported files by engine, named after the cache's file, else after the prompt's."""
        text = "prompt" if self.prompt_file in (None, "-") else Path(self.prompt_file).stem
        name = self.save_path or Path(text)
        engines: tuple[Engine, ...] = ("vllm", "llamacpp")
        folders = {to: getattr(self, f"export_{to}") for to in engines}
        return {
            to: exported_path(expand(folder), name, SUFFIXES[to])
            for to, folder in folders.items()
            if folder is not None
        }

    @property
    def new_tokens(self) -> int:
        """How many tokens may follow the prompt; 0 where no caller has said so."""
        return at_least(0, self.max_new_tokens or 0, "--max-new-tokens")

    def outputs(self) -> dict[str, Path | None]:
        exports = {f"--export-{to}": path for to, path in self.export_paths.items()}
        return {**super().outputs(), **exports}

    def check(self) -> None:
        super().check()
        _ = self.new_tokens


@dataclass(frozen=True, kw_only=True)
class GenerationSettings(DecodingSettings, PromptSettings):
    """What is generated, and how: an answer, a conversation, or the answers to many prompts.

    Attributes:
        turns: of a conversation: their file (`-` is stdin), or turns that were read.
        prompts: many: their file (`-` is stdin), or prompts that were read.
        memory: of the rows in flight, such as `8GiB`; None: half of what is free, of 64 rows at
            most.
        skip_bad: whether a prompt that cannot be answered leaves the others alone.
        cache: to go on from: its file, or the cache.
    """

    turns: str | Turns | None = flag(
        "--turns=FILE|-",
        "Answer the user's turns, one a line (text or JSON Lines) or messages in a JSON "
        "array, after the prompt.",
    )
    prompts: str | list[PromptEntry] | None = flag(
        "--prompts=FILE.jsonl|-",
        "Answer many prompts, one a line of JSON, several at a time.",
        python=None,
    )
    memory: str | None = flag(
        "--memory=BYTES",
        "Run as many of --prompts at a time as fit this cache (8GiB).  [default: half of "
        "what is free, up to 64]",
        python=None,
    )
    device_memory: str | None = flag(
        "--device-memory=SIZE",
        f"{MEMORY_HELP[:-1]}; without --prompts also --memory]",
        counts=False,
    )
    skip_bad: bool = flag(
        "--skip-bad",
        "Answer the other --prompts where one cannot be answered, and end with code 4.",
        python=None,
        default=False,
    )
    overwrite: bool = flag(
        "--overwrite",
        "Answer --prompts anew whose answers are in --output.",
        python=None,
        counts=False,
        default=False,
    )
    cache: str | KVCache | None = flag("--cache=CACHE.safetensors", "Go on from this saved cache.")
    later: bool = flag(
        "--later",
        "Questions come after the prompt was compressed: what -p auto chooses for. --turns and "
        "--save mean it, too.",
        counts=False,
        default=False,
    )
    max_new_tokens: str | int | None = flag(
        "--max-new-tokens -n=N",
        f"Stop after N new tokens.  [default: {DEFAULT_NEW_TOKENS}]",
        key="generation.max_new_tokens",
    )
    temperature: float | None = flag(
        "--temperature=T",
        "0 takes the likeliest token, above 0 samples.  [default: 0]",
        key="generation.temperature",
    )
    stop: list[str] = flag(
        "--stop=TEXT", "End where this text comes up; it stays.", key="generation.stop", default=[]
    )
    stream: bool | None = flag(
        "--stream/--no-stream",
        "Print text as it comes.  [default: on a terminal]",
        python=None,
        counts=False,
    )
    compare_full: bool = flag(
        "--compare-full", "Measure how close the run stays to a full cache.", default=False
    )
    compile: bool | None = flag(
        "--compile/--no-compile",
        "Decode through torch.compile.  [default: from 1536 new tokens on, on CUDA]",
    )

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
        return at_least(1, self.max_new_tokens, "--max-new-tokens")

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
            "graphs": self.graphs,
        }

    def check(self) -> None:
        super().check()
        _ = self.new_tokens, self.memory_bytes
        if self.later and not self.chooses:
            raise UsageError("--later goes with -p auto")
        if self.compare_full and self.chooses:
            raise UsageError("--compare-full holds a full cache, too, which -p auto does not count")
        if self.temperature is not None:
            check_temperature(self.temperature, "--temperature")
        if "" in self.stop:
            raise UsageError("--stop is empty, and every text holds that", hint="--stop TEXT")
        if self.cache_path is not None:
            check_cache_file(self.cache_path)
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
        self.check_no_share()
        if self.chooses:
            raise UsageError("-p auto goes with one prompt", hint="a policy, such as full+int8")
        for name in (*names, "compile", "tensor_parallel"):
            if getattr(self, name) not in (None, False):
                raise UsageError(f"--prompts and --{name.replace('_', '-')} exclude each other")
