"""Export a compressed cache for another engine: the call, and what `kvtool export` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.calls.base_settings import ModelSettings, check_cache_file
from kvtool.calls.from_python import check_keywords, checked, keywords_of, takes
from kvtool.documents.files import check_writable, expand
from kvtool.documents.settings import MODEL_SETTINGS, flag, settings_of
from kvtool.engines.targets import Target
from kvtool.errors import UsageError
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.cache.whole.cache import KVCache
    from kvtool.documents.generation import ExportDocument
    from kvtool.models.attached import ModelSource

_USAGE = "kvtool export book.kv.safetensors --to vllm --save exported/book.safetensors"
_TARGET = tuple(each.name for each in settings_of(Target))


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Target, ModelSettings):
    """Which cache is exported, for what, and where to."""

    file: str | None = flag("CACHE.safetensors", "A cache that kvtool compress has saved.")
    save: str | None = flag("--save=FILE", "Write the exported cache here.")

    @property
    def file_path(self) -> Path | None:
        """The cache file to read."""
        return None if self.file is None else expand(self.file)

    @property
    def save_path(self) -> Path | None:
        """The file to write."""
        return None if self.save is None else expand(self.save)

    @property
    def model_name(self) -> str | None:
        """The model: the one that is given, else the one that the file names."""
        if self.model is not None or self.loaded is not None or self.file_path is None:
            return self.model
        from kvtool.cache.files.format import read_metadata

        return read_metadata(self.file_path)["model"]

    def source(self) -> ModelSource:
        """Return where the model comes from, in the dtype that the cache was made with."""
        from kvtool.models.attached import ModelSource

        settings = {name: getattr(self, name, None) for name in MODEL_SETTINGS if name != "dtype"}
        if self.loaded is None and self.file_path is not None:
            settings["dtype"] = _stored_dtype(self.file_path)
        return ModelSource(self.model_name, settings | self.checkpoint(), self.loaded)

    def check(self) -> tuple[Path, Path]:
        """Return the file to read and the one to write.

        Raises:
            UsageError: one is missing, cannot be, or they are the same.
        """
        if self.file_path is None or self.save_path is None:
            missing = "cache is given" if self.file_path is None else "file to save to"
            raise UsageError(f"no {missing}", hint=_USAGE)
        check_cache_file(self.file_path)
        self.check_output()
        self.check_target(self.save_path)
        if self.file_path.resolve() == self.save_path.resolve():
            raise UsageError(f"--save would write over the cache `{self.file}`")
        return self.file_path, self.save_path

    def outputs(self) -> dict[str, Path | None]:
        return {"--save": self.save_path, **super().outputs()}

    def describe(self) -> dict[str, Any]:
        """Return what a dry run prints."""
        found = {"file": self.file, "model": self.model_name, "save": self.save}
        return found | {name: getattr(self, name) for name in _TARGET}

    def run(self, watcher: Watcher) -> ExportDocument:
        """Export the file, and return what there is to say of it."""
        file, save = self.check()
        source = self.source()
        if source.name != self.model:
            watcher.note(f"model: {source.name}, of which the cache is (change: --model)")
        source.check()
        watcher.note_any(source.note())
        with source.attached(note=watcher.note, progress=watcher.shows_progress) as loaded:
            from kvtool.cache.files.load import load_cache

            names = {"model_name": loaded.name, "tokenizer": loaded.tokenizer}
            cache = load_cache(file, loaded.model)
            return write_exported(cache, save, watcher, self, model=loaded.model, **names)


@takes(Target)
def export(
    cache: KVCache | str | Path,
    save: str | Path,
    *,
    model: Any = None,
    tokenizer: Any = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> ExportDocument:
    """Export a compressed cache for an engine that loads it in place of a prompt.

    Args:
        cache: a cache of one text, or the file of one.
        save: the file to write; requests to vLLM may ask for it by its name without the suffix.
        model: of a file: a folder, a hub ID or a loaded model (then with its `tokenizer`); None is
            the one that the file names. A cache knows its model.
        watcher: takes notes and progress; None: no caller does.

    `settings` are those of `Target`: `to`, the engine; `dtype` of the exported keys and values; and
    how the engine runs.

    Returns:
        What `kvtool export -f json` prints, with the virtual ids that stand for the cache.

    Raises:
        UsageError: a cache that the engine cannot serve, with the reason; a wrong argument.
        KvtoolError: a file that cannot be read or written, or one of another model.
    """
    check_keywords("export", settings, keywords_of(Target))
    given = {name: value for name, value in settings.items() if value is not None}
    asked = checked(Target, given)
    watcher = Watcher() if watcher is None else watcher
    if isinstance(cache, (str, Path)):
        from kvtool.models.attached import ModelSource

        source = ModelSource.of(model, tokenizer)
        file: dict[str, Any] = {"model": source.name, "loaded": source.loaded, "file": str(cache)}
        return ExportSettings(**file, save=str(save), **asked).run(watcher)
    path, target = expand(str(save)), Target(**asked)
    check_writable(path, "--save")
    target.check_target(path)
    return write_exported(cache, path, watcher, target, model=model, tokenizer=tokenizer)


def write_exported(
    cache: KVCache, path: Path, watcher: Watcher, target: Target | None = None, **more: Any
) -> ExportDocument:
    """Export a cache into a file, and return what there is to say of it.

    Args:
        target: the engine, and how it runs; None: vLLM.
        more: further arguments of `kvtool.engines.virtual_prompt.export_cache`.
    """
    import torch

    from kvtool.documents.generation import ExportDocument
    from kvtool.engines.virtual_prompt import export_cache

    target = target or Target()
    exact = None if target.dtype == "auto" else getattr(torch, target.dtype)
    exported = export_cache(cache, to=target.to, dtype=exact, **more)
    for line in exported.notes:
        watcher.note(line)
    held_as, size = target.write(exported, path)
    metadata = exported.metadata
    return ExportDocument(
        model=metadata["model"],
        policy=metadata["policy"],
        saved=str(path),
        slots=len(exported.ids),
        tokens_seen=int(metadata["tokens_seen"]),
        dtype=held_as,
        bytes=size,
        virtual_ids=[] if target.to == "mlx" else exported.ids,
        text=metadata.get("text"),
    )


def _stored_dtype(path: Path) -> str | None:
    """Return the dtype of the model that made a cache file; None where it holds codes."""
    from kvtool.cache.files.format import read_file

    tensors = read_file(path, with_tensors=True)[1]
    found = [tensor.dtype for name, tensor in tensors.items() if name.endswith(".values")]
    name = str(found[0]).removeprefix("torch.") if found else ""
    return name if name in ("float32", "bfloat16", "float16") else None
