"""Models that run kvtool's attention, as commands and Python calls are given them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtool.documents.memory import DeviceMemory
from kvtool.errors import UsageError
from kvtool.garbage import collect_as_usual
from kvtool.identity import config_hash
from kvtool.models.folder import check_folder, find_source
from kvtool.models.load import CHECKPOINT, Loaded, load, load_config, load_tokenizer
from kvtool.models.notes import model_note
from kvtool.models.placement import free_memory, memory_of, weight_bytes
from kvtool.planning.parameters import Bits


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: its name and how to load it, or one that is loaded already.

    Attributes:
        name: a folder or a hub ID; None is the bundled reference model.
        settings: further arguments of `kvtool.models.load.load`; None is its default.
        loaded: the model, once it is loaded.
    """

    name: str | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    loaded: Loaded | None = None

    @classmethod
    def of(cls, model: Any, tokenizer: Any = None, **settings: Any) -> ModelSource:
        """Return the source that a caller gives as a name, a path or a loaded model.

        Raises:
            UsageError: a loaded model without its tokenizer.
        """
        if model is None or isinstance(model, (str, Path)):
            return cls(None if model is None else str(model), settings)
        loaded = model if isinstance(model, Loaded) else _name_loaded(model, tokenizer)
        return cls(loaded.name, settings, loaded=loaded)

    @property
    def revision(self) -> str | None:
        """Branch, tag or commit on the hub."""
        return self.settings.get("revision")

    @property
    def where(self) -> dict[str, Any]:
        """Return which files of the checkpoint are read, and how."""
        given = {name: self.settings.get(name) for name in CHECKPOINT}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def dtype(self) -> str:
        """The dtype by name: that of the loaded model, else the one asked for."""
        if self.loaded is not None:
            return str(self.loaded.model.dtype).removeprefix("torch.")
        return self.settings.get("dtype") or "auto"

    @property
    def is_folder(self) -> bool:
        """Whether the model comes from a folder on this machine."""
        return self.loaded is None and find_source(self.name).is_here

    def device_memory(
        self,
        config: Any,
        dtype: str,
        device: str,
        *,
        spread: bool = False,
        bits: Bits | None = None,
        memory: int | None = None,
    ) -> DeviceMemory:
        """Estimate what the weights will take of a device, and what is free there.

        The weights of a loaded model are in what is not free, but part of a memory that is named.

        Args:
            device: `cpu`, `cuda` or `cuda:1`.
            spread: whether the model is spread over all GPUs.
            bits: as for `weight_bytes`.
            memory: of the device, in bytes; None: what is free there.
        """
        if self.loaded is not None:
            place, free = free_memory(str(self.loaded.model.device))
            weights = 0 if memory is None else self.loaded.model.get_memory_footprint()
            return DeviceMemory(device=place, free_bytes=memory or free, weights_bytes=weights)
        place, free = memory_of(device, memory, spread=spread)
        given: dict[str, Any] = {"bits": bits, "name": self.name, "device": place}
        weights = weight_bytes(config, dtype, self.where, **given)
        return DeviceMemory(device=place, free_bytes=free, weights_bytes=weights)

    def note(self) -> str | None:
        """Say which model it is, where the user has named none or the hub is asked."""
        return None if self.loaded is not None else model_note(self.name)

    def check(self, *, config_only: bool = False) -> None:
        """Refuse a folder that lacks what loading needs, as `check_folder`."""
        if self.loaded is None:
            check_folder(self.name, config_only=config_only)

    def config(self) -> Any:
        """Return the configuration, which is all that is loaded."""
        if self.loaded is not None:
            return self.loaded.model.config
        return load_config(self.name, **self.where)

    def tokenizer(self) -> tuple[Any, Any]:
        """Return tokenizer and configuration; weights are not loaded."""
        if self.loaded is not None:
            return self.loaded.tokenizer, self.loaded.model.config
        return load_tokenizer(self.name, **self.where)

    @contextmanager
    def attached(
        self,
        *,
        note: Callable[[str], object] = lambda text: None,
        progress: bool = False,
        keep: bool = False,
    ) -> Iterator[Loaded]:
        """Load the model and let it run kvtool's attention meanwhile.

        A model that its caller has loaded runs afterwards what it ran before, once no other thread
        uses it here.
        """
        loaded = self.loaded
        if loaded is None:
            yield load_attached(self.name, self.settings, progress=progress, note=note)
            return
        from kvtool.cache.hooks.attach import attach_for_a_while, give_back

        attach_for_a_while(loaded.model)
        done = False
        try:
            yield loaded
            done = True
        finally:
            give_back(loaded.model, keep=keep and done)


def _name_loaded(model: Any, tokenizer: Any) -> Loaded:
    if not hasattr(model, "config") or not callable(getattr(model, "generate", None)):
        raise UsageError(
            "a model is a folder, a hub ID or a loaded model of transformers, "
            f"got {type(model).__name__}"
        )
    if tokenizer is None:
        raise UsageError("a loaded model needs its tokenizer", hint="tokenizer=tokenizer")
    name = model.name_or_path or type(model).__name__
    revision = getattr(model.config, "_commit_hash", None)
    return Loaded(model, tokenizer, name, revision, config_hash(model.config))


def load_attached(
    model: str | None,
    settings: Mapping[str, Any],
    *,
    progress: bool = False,
    note: Callable[[str], object] = lambda text: None,
) -> Loaded:
    """Load a model and make it run kvtool's attention.

    Args:
        settings: further arguments of `kvtool.models.load.load`; None is its default.
        note: gets the limits of the model's family.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    loaded = load(model, **given, progress=progress)
    from kvtool.cache.hooks.attach import attach, notes

    attach(loaded.model)
    collect_as_usual()
    for line in notes(loaded.model.config):
        note(line)
    return loaded
