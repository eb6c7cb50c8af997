"""Export a compressed cache for another engine: the call, and what `kvtool export` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvtool.calls.base_settings import ModelSettings, check_cache_file
from kvtool.calls.from_python import checked
from kvtool.documents.files import check_writable, expand
from kvtool.documents.settings import MODEL_SETTINGS, Dtype, flag
from kvtool.engines.vllm.format import SUFFIX
from kvtool.errors import UsageError
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.cache.whole.cache import KVCache
    from kvtool.documents.generation import ExportDocument
    from kvtool.models.attached import ModelSource

_USAGE = "kvtool export book.kv.safetensors --to vllm --save exported/book.safetensors"


@dataclass(frozen=True, kw_only=True)
class ExportSettings(ModelSettings):
    """Which cache is exported, for what, and where to.

    Attributes:
        dtype: of the exported keys and values; `auto`: that of the cache.
    """

    file: str | None = flag("CACHE.safetensors", "A cache that kvtool compress has saved.")
    to: Literal["vllm"] = flag("--to", "The engine that will load it.", default="vllm")
    save: str | None = flag("--save=FILE.safetensors", "Write the exported cache here.")
    dtype: Dtype = flag(
        "--dtype",
        "Of the exported keys and values; auto: that of the cache.  [default: auto]",
        default="auto",
    )

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
        _check_suffix(self.save_path)
        if self.file_path.resolve() == self.save_path.resolve():
            raise UsageError(f"--save would write over the cache `{self.file}`")
        return self.file_path, self.save_path

    def outputs(self) -> dict[str, Path | None]:
        return {"--save": self.save_path, **super().outputs()}

    def describe(self) -> dict[str, Any]:
        """Return what a dry run prints."""
        names = ("file", "to", "model", "save", "dtype")
        return {name: getattr(self, name) for name in names} | {"model": self.model_name}

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
            return write_exported(
                cache, save, watcher, model=loaded.model, dtype=self.dtype, **names
            )


def export(
    cache: KVCache | str | Path,
    save: str | Path,
    *,
    to: Literal["vllm"] = "vllm",
    model: Any = None,
    tokenizer: Any = None,
    dtype: Any = None,
    watcher: Watcher | None = None,
) -> ExportDocument:
    """Export a compressed cache for an engine that loads it in place of a prompt.

    Args:
        cache: a cache of one text, or the file of one.
        save: the file to write; requests may ask for it by its name without the suffix.
        to: the engine.
        model: of a file: a folder, a hub ID or a loaded model (then with its `tokenizer`); None is
            the one that the file names. A cache knows its model.
        dtype: of the exported keys and values; None: that of the model.
        watcher: takes notes and progress; None: no caller does.

    Returns:
        What `kvtool export -f json` prints, with the virtual ids that stand for the cache.

    Raises:
        UsageError: a cache that the engine cannot serve, with the reason; a wrong argument.
        KvtoolError: a file that cannot be read or written, or one of another model.
    """
    dtype = checked(ExportSettings, {"to": to, "dtype": dtype or "auto"})["dtype"]
    watcher = Watcher() if watcher is None else watcher
    if isinstance(cache, (str, Path)):
        from kvtool.models.attached import ModelSource

        source = ModelSource.of(model, tokenizer)
        asked = ExportSettings(
            model=source.name,
            loaded=source.loaded,
            file=str(cache),
            to=to,
            save=str(save),
            dtype=dtype,
        )
        return asked.run(watcher)
    path = expand(str(save))
    check_writable(path, "--save")
    _check_suffix(path)
    return write_exported(cache, path, watcher, model=model, tokenizer=tokenizer, dtype=dtype)


def write_exported(
    cache: KVCache, path: Path, watcher: Watcher, *, dtype: str = "auto", **more: Any
) -> ExportDocument:
    """Export a cache into a file, and return what there is to say of it.

    Args:
        dtype: of the exported keys and values; `auto`: that of the model.
        more: further arguments of `kvtool.engines.vllm.virtual_prompt.export_cache`.
    """
    import torch

    from kvtool.documents.generation import ExportDocument
    from kvtool.engines.vllm.virtual_prompt import export_cache

    exact = None if dtype == "auto" else getattr(torch, dtype)
    exported = export_cache(cache, dtype=exact, **more)
    for line in exported.notes:
        watcher.note(line)
    exported.save(path)
    metadata = exported.metadata
    return ExportDocument(
        model=metadata["model"],
        policy=metadata["policy"],
        saved=str(path),
        slots=len(exported.ids),
        tokens_seen=int(metadata["tokens_seen"]),
        dtype=metadata["dtype"],
        bytes=exported.nbytes,
        virtual_ids=exported.ids,
    )


def _check_suffix(path: Path) -> None:
    """Refuse a file that an engine would not look at."""
    if path.suffix != SUFFIX:
        raise UsageError(f"--save must end in {SUFFIX}, got `{path.name}`", hint=_USAGE)


def _stored_dtype(path: Path) -> str | None:
    """Return the dtype of the model that made a cache file; None where it holds codes."""
    from kvtool.cache.files.format import read_file

    tensors = read_file(path, with_tensors=True)[1]
    found = [tensor.dtype for name, tensor in tensors.items() if name.endswith(".values")]
    name = str(found[0]).removeprefix("torch.") if found else ""
    return name if name in ("float32", "bfloat16", "float16") else None
