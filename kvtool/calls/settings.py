"""What a call that reads a prompt is asked to do, as it was given."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvtool.documents.files import check_name, check_prompt, check_writable, expand
from kvtool.documents.flags import MODEL_SETTINGS
from kvtool.errors import UsageError, quote
from kvtool.models.folder import check_folder
from kvtool.sizes import DEFAULT_NEW_TOKENS, check_temperature, parse_count

if TYPE_CHECKING:
    from kvtool.cache.cache import KVCache
    from kvtool.documents.plan import PlanDocument
    from kvtool.documents.source import Source
    from kvtool.documents.turns import Turns
    from kvtool.models.attached import ModelSource
    from kvtool.models.load import Loaded
    from kvtool.policies.policy import Policy

_NEEDLE_ANSWER_TOKENS = 8  # at most seven digits and a full stop


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model runs, and on what; None is the default of `kvtool.models.load.load`.

    Attributes:
        model: a folder or a hub ID; None is the bundled reference model.
        loaded: the model, where the caller has loaded it.
    """

    model: str | None = None
    revision: str | None = None
    dtype: str | None = None
    device: str | None = None
    device_map: str | None = None
    tensor_parallel: bool | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    loaded: Loaded | None = None

    def source(self) -> ModelSource:
        """Return where the model comes from."""
        from kvtool.models.attached import ModelSource

        settings = {name: getattr(self, name) for name in MODEL_SETTINGS}
        return ModelSource(self.model, settings, self.trust_remote_code, self.loaded)

    def check_model(self) -> None:
        """Refuse a folder that is not there, without importing torch."""
        if self.loaded is None:
            check_folder(self.model)


@dataclass(frozen=True, kw_only=True)
class PromptSettings(ModelSettings):
    """A prompt, and the policy and budget of the cache it fills.

    Attributes:
        recipe: a recipe or a plan: its file (`-` is stdin), or a document that was read.
        set, unset: keys of the recipe.
    """

    recipe: str | Source | PlanDocument | None = None
    set: list[str] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)
    prompt: str | None = None
    prompt_file: str | None = None
    system: str | None = None
    chat_template: Literal["auto", "on", "off"] = "auto"
    policy: str | Policy | None = None
    budget: str | None = None
    allocator: str | None = None
    prefill: str | None = None
    seed: int | None = None
    save: str | None = None
    show: str | None = None

    @property
    def save_path(self) -> Path | None:
        """The cache file to write."""
        return None if self.save is None else expand(self.save)

    @property
    def show_path(self) -> Path | None:
        """The page of the kept text to write."""
        return None if self.show is None or self.show == "-" else expand(self.show)

    @property
    def continues(self) -> bool:
        """Whether a cache that holds a text is gone on from."""
        return False

    def check(self) -> None:
        """Refuse settings that are wrong by themselves, without importing torch."""
        self._check_show()
        if self.system is None:
            return
        check_prompt(self.system, "--system")
        if self.chat_template == "off":
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
        """Refuse files and folders that are not there, without importing torch."""
        for path, option in ((self.save_path, "--save"), (self.show_path, "--show")):
            if path is not None:
                check_writable(path, option)
        self.check_model()


@dataclass(frozen=True, kw_only=True)
class CompressionSettings(PromptSettings):
    """A prompt that is read once.

    Attributes:
        max_new_tokens: that will be generated from its cache, questions included.
    """

    max_new_tokens: str | int | None = None

    @property
    def new_tokens(self) -> int:
        """How many tokens may follow the prompt; 0: nobody has said so."""
        return 0 if self.max_new_tokens is None else parse_count(self.max_new_tokens)

    def check(self) -> None:
        super().check()
        if self.new_tokens < 0:
            raise UsageError(f"--max-new-tokens must be 0 or more, got {self.max_new_tokens}")


@dataclass(frozen=True, kw_only=True)
class GenerationSettings(PromptSettings):
    """What is generated, and how.

    Attributes:
        turns: of a conversation: their file (`-` is stdin), or turns that were read.
        cache: to go on from: its file, or the cache.
    """

    turns: str | Turns | None = None
    cache: str | KVCache | None = None
    max_new_tokens: str | int | None = None
    temperature: float | None = None
    stop: list[str] = field(default_factory=list)
    compare_full: bool = False
    compile: bool | None = None

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
        given = (self.prompt, self.prompt_file, self.turns, self.cache)
        return all(each is None for each in given)

    @property
    def new_tokens(self) -> int:
        """How many tokens to generate at most."""
        if self.max_new_tokens is None:
            return _NEEDLE_ANSWER_TOKENS if self.wants_needle else DEFAULT_NEW_TOKENS
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
