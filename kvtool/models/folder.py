"""Check a model folder before anything heavy is imported."""

from __future__ import annotations

import json
from pathlib import Path, PurePath

from kvtool.documents.files import check_name, check_unicode, expand
from kvtool.errors import UsageError, quote
from kvtool.models import reference
from kvtool.models.adapter import check_adapter, find_adapter
from kvtool.models.config_sizes import check_sizes

REFERENCE = "reference"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_INDEXES = tuple(f"{name}.index.json" for name in _WEIGHTS)
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


def is_bundled(model: str) -> bool:
    """Tell whether a name is that of a bundled model; a folder of that name goes first."""
    return model in reference.CHECKPOINTS and not Path(model).exists()


def base_of(model: str | None, revision: str | None = None) -> tuple[str | None, str | None]:
    """Return the model, and its revision, that says how an adapter's folder is run; or the same."""
    adapter = None if model is None or is_bundled(model) else find_adapter(model)
    return (model, revision) if adapter is None else (adapter.base, adapter.revision)


def tokenizer_folder(model: str | None) -> str | None:
    """Return an adapter's own folder if it holds a tokenizer; None: its base has the tokenizer."""
    if base_of(model)[0] == model:
        return None
    source = find_source(model)[1]
    return source if any((Path(source) / file).is_file() for file in _TOKENIZERS) else None


def find_source(model: str | None) -> tuple[str, str]:
    """Find the name to report and the place to load from; None is the bundled reference model."""
    if model is None:
        return REFERENCE, str(reference.path())
    if is_bundled(model):
        return model, str(reference.path(model))
    home = expand(model)  # which refuses what is no path
    return model, str(home) if model.startswith("~") else model


def check_folder(model: str | None, *, config_only: bool = False) -> None:
    """Refuse, without importing torch, a model folder that lacks what loading needs.

    Args:
        config_only: whether neither weights nor a tokenizer will be needed.

    Raises:
        UsageError: the folder, its config.json, its weights or its tokenizer is missing.
    """
    name, source = find_source(model)
    if not source.strip():
        raise UsageError("the model name is empty", hint="give a folder or a hub ID")
    folder = Path(source)
    check_name(folder, "--model")
    check_unicode(name, "the name of model")
    if source.lower().endswith(".gguf") and not folder.is_dir():
        raise _refuse_gguf(name)
    if not folder.is_dir():
        if folder.is_file():
            raise UsageError(f"model `{name}` is a file", hint="give the folder that holds it")
        if source.startswith(("/", "./", "../")) or source.endswith("/") or source.count("/") > 1:
            raise UsageError(f"model folder `{name}` does not exist")
        return
    config = folder / "config.json"
    gguf = next(iter(sorted(folder.glob("*.gguf"))), None)
    if gguf is not None and not _has_weights(folder):
        raise _refuse_gguf(str(gguf))
    adapter = find_adapter(source)
    if adapter is not None:
        check_adapter(adapter)
        check_folder(adapter.base, config_only=config_only)
        return
    if not config.is_file():
        raise UsageError(f"model folder `{name}` has no config.json")
    try:
        data = json.loads(config.read_bytes())
        if not isinstance(data, dict):
            raise ValueError("it holds no mapping")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"`{config}` is not valid JSON: {error}") from None
    check_sizes(name, data)
    if config_only:
        return
    _check_weights(name, folder)
    if not any((folder / file).is_file() for file in _TOKENIZERS):
        raise UsageError(f"model folder `{name}` has no tokenizer (no tokenizer.json)")


def _refuse_gguf(name: str) -> UsageError:
    return UsageError(
        f"`{name}` is a GGUF file, a format that kvtool does not read",
        hint="give the checkpoint that it was made from, a folder or hub ID with safetensors",
    )


def _has_weights(folder: Path) -> bool:
    return any((folder / file).is_file() for file in (*_WEIGHTS, *_INDEXES))


def _check_weights(name: str, folder: Path) -> None:
    """Refuse a folder without weights; all indexes are read, since transformers chooses one."""
    whole = any((folder / file).is_file() for file in _WEIGHTS)
    indexes = [folder / file for file in _INDEXES if (folder / file).is_file()]
    if not whole and not indexes:
        raise UsageError(f"model folder `{name}` has no weights (no {_WEIGHTS[0]})")
    for index in indexes:
        shards = _read_shards(index)
        for shard in shards:
            _check_inside(index, shard)
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing and not whole:
            raise UsageError(
                f"model folder `{name}` lacks {len(missing)} of {len(shards)} weight files "
                f"(first: {missing[0]})"
            )
        whole = True  # a further index is of weights in another format


def _read_shards(index: Path) -> list[str]:
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"`{index}` is not an index of weight files") from None
    if not all(isinstance(shard, str) for shard in shards):
        raise UsageError(f"`{index}` is not an index of weight files")
    return sorted(shards)


def _check_inside(index: Path, shard: str) -> None:
    """Refuse a weight file that an index places outside of its folder.

    In the hub's cache a file of a snapshot is a link into the `blobs` of the same model.
    """
    folder = index.parent.resolve()
    places = [folder]
    if folder.parent.name == "snapshots":
        places.append(folder.parent.parent / "blobs")
    try:
        named = PurePath(shard)
        inside = not named.is_absolute() and ".." not in named.parts
        inside = inside and any((folder / named).resolve().is_relative_to(p) for p in places)
    except (OSError, ValueError, RuntimeError):  # no name of a file, links in a circle
        inside = False
    if not inside:
        raise UsageError(
            f"`{index}` names {quote(shard)}, which is outside the model's folder",
            hint="put the weight files into that folder",
        )
