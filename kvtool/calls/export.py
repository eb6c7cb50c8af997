"""Export a compressed cache for another engine: the call, and what `kvtool export` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from kvtool.calls.base_settings import ModelSettings
from kvtool.calls.from_python import checked
from kvtool.documents.files import check_name, check_writable, expand
from kvtool.documents.settings import MODEL_SETTINGS, Dtype, Flag
from kvtool.engines.vllm.format import SUFFIX
from kvtool.errors import UsageError
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.cache.whole.cache import KVCache
    from kvtool.documents.generation import ExportDocument
    from kvtool.engines.vllm.virtual_prompt import VirtualPrompt
    from kvtool.models.attached import ModelSource
    from kvtool.models.load import Loaded

_USAGE = "kvtool export book.kv.safetensors --to vllm --save exported/book.safetensors"


@dataclass(frozen=True, kw_only=True)
class ExportSettings(ModelSettings):
    """Which cache is exported, for what, and where to.

    Attributes:
        dtype: of the exported keys and values; `auto`: that of the cache.
    """

    file: Annotated[
        str | None,
        Flag(metavar="CACHE.safetensors", help="A cache that kvtool compress has saved."),
    ] = None
    to: Annotated[Literal["vllm"], Flag("--to", help="The engine that will load it.")] = "vllm"
    save: Annotated[
        str | None,
        Flag("--save", metavar="FILE.safetensors", help="Write the exported cache here."),
    ] = None
    dtype: Annotated[
        Dtype,
        Flag(
            "--dtype",
            help="Of the exported keys and values; auto: that of the cache.  [default: auto]",
        ),
    ] = "auto"

    @property
    def file_path(self) -> Path | None:
        """The cache file to read."""
        return None if self.file is None else expand(self.file)

    @property
    def save_path(self) -> Path | None:
        """The file to write."""
        return None if self.save is None else expand(self.save)

    def source(self) -> ModelSource:
        """Return where the model comes from, in the dtype that the cache was made with."""
        from kvtool.models.attached import ModelSource

        settings = {name: getattr(self, name, None) for name in MODEL_SETTINGS if name != "dtype"}
        if self.loaded is None and self.file_path is not None:
            settings["dtype"] = _stored_dtype(self.file_path)
        return ModelSource(self.model, settings | self.checkpoint(), self.loaded)

    def check(self) -> tuple[Path, Path]:
        """Return the file to read and the one to write.

        Raises:
            UsageError: one is missing, cannot be, or they are the same.
        """
        self.check_output()
        if self.file_path is None or self.save_path is None:
            missing = "cache is given" if self.file_path is None else "file to save to"
            raise UsageError(f"no {missing}", hint=_USAGE)
        check_name(self.file_path, "CACHE")
        if not self.file_path.is_file():
            raise UsageError(f"cache file `{self.file}` does not exist")
        _check_save(self.save_path)
        for other, name in ((self.file_path, "the cache"), (self.output_path, "--output")):
            if other is not None and other.resolve() == self.save_path.resolve():
                raise UsageError(f"--save and {name} are the same file, `{other}`")
        return self.file_path, self.save_path

    def describe(self) -> dict[str, Any]:
        """Return what a dry run prints."""
        names = ("file", "to", "model", "save", "dtype")
        return {name: getattr(self, name) for name in names}

    def run(self, watcher: Watcher) -> ExportDocument:
        """Export the file, and return what there is to say of it."""
        file, save = self.check()
        source = self.source()
        source.check()
        watcher.note_any(source.note())
        with source.attached(note=watcher.note, progress=watcher.shows_progress) as loaded:
            from kvtool.cache.files.load import load_cache

            cache = load_cache(file, loaded.model)
            exported = export_loaded(cache, loaded, self.dtype)
        for line in exported.notes:
            watcher.note(line)
        exported.save(save)
        return document_of(exported, save)


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
            the bundled reference model. A cache knows its model.
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
    _check_save(path)
    from kvtool.engines.vllm.virtual_prompt import export_cache

    exported = export_cache(cache, model=model, tokenizer=tokenizer, dtype=_torch_dtype(dtype))
    for line in exported.notes:
        watcher.note(line)
    exported.save(path)
    return document_of(exported, path)


def export_loaded(cache: KVCache, loaded: Loaded, dtype: str | None = None) -> VirtualPrompt:
    """Export a cache of a loaded model."""
    from kvtool.engines.vllm.virtual_prompt import export_cache

    return export_cache(
        cache,
        model=loaded.model,
        model_name=loaded.name,
        tokenizer=loaded.tokenizer,
        dtype=_torch_dtype(dtype),
    )


def document_of(exported: VirtualPrompt, path: Path) -> ExportDocument:
    """Return what there is to say of an exported cache."""
    from kvtool.documents.generation import ExportDocument

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


def _check_save(path: Path) -> None:
    """Refuse a file that cannot be written, or that an engine would not look at."""
    check_writable(path, "--save")
    if path.suffix != SUFFIX:
        raise UsageError(f"--save must end in {SUFFIX}, got `{path.name}`", hint=_USAGE)


def _stored_dtype(path: Path) -> str | None:
    """Return the dtype of the model that made a cache file; None where it holds codes."""
    from kvtool.cache.files.format import read_file

    tensors = read_file(path, with_tensors=True)[1]
    found = [tensor.dtype for name, tensor in tensors.items() if name.endswith(".values")]
    name = str(found[0]).removeprefix("torch.") if found else ""
    return name if name in ("float32", "bfloat16", "float16") else None


def _torch_dtype(name: str | None) -> Any:
    if name is None or name == "auto":
        return None
    import torch

    return getattr(torch, name)
