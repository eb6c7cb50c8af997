"""The settings that commands with a model share: which model, which recipe."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.calls.output_settings import OutputSettings
from kvtool.documents.files import check_name
from kvtool.documents.settings import MODEL_SETTINGS, ModelFields, as_flags, flag
from kvtool.errors import UsageError
from kvtool.policies.allocate.table import ALLOCATORS
from kvtool.sizes import LARGEST_SEED, parse_count, parse_memory

if TYPE_CHECKING:
    from kvtool.documents.plan import PlanDocument
    from kvtool.documents.source import Source
    from kvtool.models.attached import ModelSource
    from kvtool.models.load import Loaded

    _ModelFlags = ModelFields

    class _SplitFlag:
        pass

else:
    PlanDocument = Source = Loaded = Any
    _ONE_PROCESS = tuple(name for name in MODEL_SETTINGS if name != "tensor_parallel")
    _ModelFlags = as_flags(ModelFields, leave_out=("tensor_parallel",), under="model")
    _SplitFlag = as_flags(ModelFields, leave_out=_ONE_PROCESS, under="model")


def at_least(least: int, given: str | int, option: str) -> int:
    """Read a number of tokens that has a lower bound.

    Raises:
        UsageError: no number of tokens, or a lower one.
    """
    count = parse_count(given)
    if count < least:
        raise UsageError(f"{option} must be {least} or more, got {given}")
    return count


def check_cache_file(path: Path) -> None:
    """Refuse a saved cache that is not there.

    Raises:
        UsageError: it is not.
    """
    check_name(path, "--cache")
    if not path.is_file():
        why = "is a folder" if path.is_dir() else "does not exist"
        raise UsageError(f"cache file `{path}` {why}", hint="--cache book.kv.safetensors")


@dataclass(frozen=True, kw_only=True)
class RunSettings(OutputSettings):
    """Settings of every command that runs a model."""

    trust_remote_code: bool = flag(
        "--trust-remote-code", "Run code that comes with the checkpoint.", default=False
    )
    seed: int | None = flag(
        "--seed=N", "Seed of everything random.  [default: 0]", min=0, max=LARGEST_SEED, key="seed"
    )
    dry_run: bool = flag(
        "--dry-run", "Print the resolved configuration and stop.", python=None, default=False
    )


@dataclass(frozen=True, kw_only=True)
class ModelSettings(_ModelFlags, RunSettings):
    """Which model runs, and on what; None is the default of `kvtool.models.load.load`.

    Attributes:
        model: a folder or a hub ID; None is the bundled reference model.
        loaded: the model, where the caller has loaded it.
        environment: settings that variables of the environment gave, which recipes override.
    """

    model: str | None = flag(
        "--model -m=ID|DIR|GGUF",
        "Model; smollm2: of its package.  [default: the bundled reference]",
        key="model.id",
        env="KVTOOL_MODEL",
    )
    loaded: Loaded | None = None
    environment: tuple[str, ...] = ()

    def source(self) -> ModelSource:
        """Return where the model comes from."""
        from kvtool.models.attached import ModelSource

        settings = {name: getattr(self, name, None) for name in MODEL_SETTINGS}
        return ModelSource(self.model, settings | self.checkpoint(), self.loaded)

    def checkpoint(self) -> dict[str, Any]:
        """Return how the files of a checkpoint are asked for."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    def command(self, words: list[str], flags: dict[str, Any]) -> str:
        """Spell a command with the flags that are not None, and one to trust the code if given."""
        given = [each for pair in flags.items() if pair[1] is not None for each in pair]
        trusting = ["--trust-remote-code"] if self.trust_remote_code else []
        return shlex.join([*words, *map(str, given), *trusting])


@dataclass(frozen=True, kw_only=True)
class DecodingSettings:
    """How decode steps run."""

    graphs: bool = flag(
        "--graphs/--no-graphs",
        "Replay decode steps as CUDA graphs, on CUDA.  [default: graphs]",
        default=True,
    )


MEMORY_HELP = (
    "Memory, weights included, that --dry-run, -b auto and -p auto count with (16GiB).  "
    "[default: what is free]"
)


@dataclass(frozen=True, kw_only=True)
class DeviceSettings(ModelSettings):
    """The memory of a device, which need not be one of this machine."""

    device_memory: str | None = flag("--device-memory --memory=SIZE", MEMORY_HELP, counts=False)

    @property
    def memory_there(self) -> int | None:
        """The bytes of the device's memory; None: what is free on this machine."""
        given = self.device_memory
        return None if given is None else parse_memory(given, "--device-memory")

    @property
    def elsewhere(self) -> bool:
        """Whether a dry run is for a device that is not named, in place of one that is here."""
        named = self.device not in (None, "auto") or self.device_map is not None
        return self.dry_run and self.memory_there is not None and not named

    @property
    def planned_device(self) -> str:
        """The device that a run is for: one of this machine, or a GPU elsewhere."""
        from kvtool.models.placement import resolve_device

        if self.loaded is not None:
            return str(self.loaded.model.device)
        return resolve_device(self.device or "auto", self.device_map, elsewhere=self.elsewhere)

    def check_memory(self, *, used: bool) -> None:
        """Refuse a memory that nothing is planned in.

        Args:
            used: whether something is, beside a dry run.

        Raises:
            UsageError: a memory that is no size in bytes, or that nothing counts with.
        """
        if self.memory_there is not None and not (used or self.dry_run):
            raise UsageError("--device-memory goes with --dry-run, -b auto or -p auto")


@dataclass(frozen=True, kw_only=True)
class RecipeSettings(_SplitFlag, DeviceSettings):
    """A recipe or a plan, over which flags and then `--set` are laid.

    Attributes:
        recipe: a recipe or a plan: its file (`-` is stdin), or a document that was read.
        set, unset: keys of the recipe.
    """

    recipe: str | Source | PlanDocument | None = flag(
        "[RECIPE|PLAN|-]", "A recipe, or a plan of kvtool plan-budget; - stdin.", python="plan"
    )
    allocator: str | None = flag(
        "--allocator=NAME",
        f"Split the budget over layers: {', '.join(ALLOCATORS)}.",
        key="allocator",
    )
    strict: bool = flag(
        "--strict",
        "Refuse a plan for more memory than is free, in place of a warning.",
        counts=False,
        default=False,
    )
    set: list[str] = flag(
        "--set -s=KEY=VALUE", "Set a key of the recipe, last of all.", python=None, default=[]
    )
    unset: list[str] = flag("--unset=KEY", "Remove a key of the recipe.", python=None, default=[])
