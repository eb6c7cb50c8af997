"""Load a model and its tokenizer, from a folder, the hub or this package."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.documents.files import check_name
from kvtool.errors import KvtoolError, UsageError
from kvtool.identity import config_hash
from kvtool.model_shape import layer_shapes
from kvtool.processes import started

if TYPE_CHECKING:
    import torch

REFERENCE = "reference"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_INDEXES = tuple(f"{name}.index.json" for name in _WEIGHTS)
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
_SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)\. ")
_UNQUANTISED = "give the checkpoint that it was made from"
_QUANTISED = {"gptq": "GPTQ", "awq": "AWQ"}  # others are called as they are named in config.json
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


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
    trust_remote_code: bool = False,
    progress: bool = False,
) -> Loaded:
    """Load a causal language model for inference.

    Args:
        model: a folder or a hub ID; None is the bundled reference model.
        revision: branch, tag or commit on the hub.
        dtype: a torch dtype by name; `auto` is the checkpoint's on a GPU and float32 on a CPU.
        device: `cpu`, `cuda`, `cuda:1` ...; `auto` is the first GPU if there is one.
        device_map: spread the layers, as in transformers (`auto`, `balanced` ...); replaces device.
        tensor_parallel: split every layer over the processes that torchrun has started.
        attn_implementation: `eager`, `sdpa` or `flash_attention_2`; `auto` leaves it to the model.
        trust_remote_code: allow code that comes with the checkpoint to run.
        progress: show on stderr how far a download is.

    Raises:
        UsageError: no such folder or model, files missing in it, an option that cannot work here.
        KvtoolError: the hub cannot be reached, the weights cannot be read, the architecture cannot
            be run with a compressed cache.
    """
    check_folder(model)
    place = resolve_device(device, device_map)
    if tensor_parallel:
        _check_processes(device, device_map)
    check_attention(attn_implementation, place)
    name, source = _source(model)
    where = {"revision": revision} if revision else {}
    where["trust_remote_code"] = trust_remote_code
    with _library_output_on_stderr(progress):
        with _in_one_line("configuration", name, trust_remote_code):
            config = _load_config(name, source, where)
            split = _split_over_processes(config) if tensor_parallel else {}
        with _in_one_line("tokenizer", name, trust_remote_code):
            tokenizer = _load_tokenizer(source, where)
        with (
            _in_one_line("weights", name, trust_remote_code),
            _named_if_quantised(name, config),
        ):
            loaded = _load_weights(
                name,
                source,
                config=config,
                dtype=_dtype(dtype, place, device_map),
                device_map=device_map,
                attn_implementation=None if attn_implementation == "auto" else attn_implementation,
                **split,
                **where,
            )
            if device_map is None and not tensor_parallel:
                loaded.to(place)
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
    name, source = _source(model)
    where = {"revision": revision} if revision else {}
    where["trust_remote_code"] = trust_remote_code
    with _library_output_on_stderr(progress=False):
        with _in_one_line("configuration", name, trust_remote_code):
            config = _load_config(name, source, where)
        with _in_one_line("tokenizer", name, trust_remote_code):
            return _load_tokenizer(source, where), config


def load_config(
    model: str | None = None, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Load a model's configuration alone: a folder needs no more than its config.json.

    Raises:
        UsageError, KvtoolError: as `load`.
    """
    check_folder(model, config_only=True)
    name, source = _source(model)
    where = {"revision": revision} if revision else {}
    where["trust_remote_code"] = trust_remote_code
    with (
        _library_output_on_stderr(progress=False),
        _in_one_line("configuration", name, trust_remote_code),
    ):
        return _load_config(name, source, where)


def check_folder(model: str | None, *, config_only: bool = False) -> None:
    """Refuse, without importing torch, a model folder that lacks what loading needs.

    Args:
        config_only: whether neither weights nor a tokenizer will be needed.

    Raises:
        UsageError: the folder, its config.json, its weights or its tokenizer is missing.
    """
    name, source = _source(model)
    if not source.strip():
        raise UsageError("the model name is empty", hint="give a folder or a hub ID")
    folder = Path(source)
    check_name(folder, "--model")
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
    if not config.is_file():
        raise UsageError(f"model folder `{name}` has no config.json")
    try:
        if not isinstance(json.loads(config.read_bytes()), dict):
            raise ValueError("it holds no mapping")
    except ValueError as error:
        raise UsageError(f"`{config}` is not valid JSON: {error}") from None
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


def resolve_device(device: str, device_map: str | None = None) -> str:
    """Turn `auto` into a device of this machine, and refuse one that it does not have.

    Of several processes on a machine, each takes a GPU of its own for `auto`.
    """
    import torch

    if device_map is not None and device != "auto":
        raise UsageError("--device and --device-map exclude each other; keep one")
    if device_map is not None and device_map not in _MAPS:
        _check_device(device_map, "--device-map", f"no device map `{device_map}`", _MAPS)
    if device == "auto":
        if not torch.cuda.is_available():
            return "cpu"
        processes = started()
        index = processes.local_rank % torch.cuda.device_count()
        return "cuda" if processes.count == 1 else f"cuda:{index}"
    _check_device(device, "--device", f"no device `{device}`", ("auto",))
    return device


def _check_device(device: str, flag: str, wrong: str, besides: Sequence[str]) -> None:
    """Refuse what is no device, and one that this machine does not have.

    Args:
        flag: where it was given.
        wrong: what is wrong with it.
        besides: what else could be given.
    """
    import torch

    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or device.endswith(":"):
        raise UsageError(f"{wrong}; choose {', '.join(besides)}, cpu, cuda or cuda:0")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(index or 0) >= count:
        raise UsageError(f"{wrong}: {count} CUDA devices here", hint=f"{flag} cpu")


def _check_processes(device: str, device_map: str | None) -> None:
    """Refuse tensor parallelism without processes, or where something else chooses devices."""
    if device_map is not None:
        raise UsageError("--tensor-parallel and --device-map exclude each other; keep one")
    if device != "auto":
        raise UsageError(
            f"--tensor-parallel takes a device for each process, not --device {device}",
            hint="leave out --device; CUDA_VISIBLE_DEVICES chooses the GPUs",
        )
    if started().count == 1:
        raise UsageError(
            "--tensor-parallel splits a model over processes, and there is one",
            hint="start with torchrun --nproc-per-node N -m kvtool ..",
        )


def _split_over_processes(config: Any) -> dict[str, Any]:
    """Return how transformers is told to split a model over all processes.

    Raises:
        UsageError: heads that cannot be split into equal parts.
        KvtoolError: a family whose split transformers does not know.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    count = started().count
    kv_heads = min(layer.kv_heads for layer in layer_shapes(config) if layer is not None)
    if kv_heads % count:
        raise UsageError(
            f"{kv_heads} KV heads cannot be split over {count} processes",
            hint=f"as many processes as divide {kv_heads}",
        )
    if not getattr(config.get_text_config(decoder=True), "base_model_tp_plan", None):
        raise KvtoolError(f"transformers has no tensor-parallel plan for `{config.model_type}`")
    return {"distributed_config": DistributedConfig(tp_size=count, tp_plan="auto")}


def resolve_dtype(dtype: str, device: str) -> str:
    """Say what `auto` means on a device: `float32` on a CPU, the checkpoint's own (`auto`) else."""
    return "float32" if dtype == "auto" and device == "cpu" else dtype


def check_attention(attn_implementation: str, device: str) -> None:
    """Refuse an attention kernel that this machine cannot run."""
    from importlib.util import find_spec

    if attn_implementation != "flash_attention_2":
        return
    if find_spec("flash_attn") is None:
        raise UsageError(
            "--attn-implementation flash_attention_2 needs the flash-attn package",
            hint="pip install 'kvtool[flash]'",
        )
    if device == "cpu":
        raise UsageError("--attn-implementation flash_attention_2 needs a CUDA device, not cpu")


def _source(model: str | None) -> tuple[str, str]:
    """Return the name to report and the place to load from."""
    if model is None or (model == REFERENCE and not Path(model).exists()):
        from kvtool.models import reference

        return REFERENCE, str(reference.path())
    return model, os.path.expanduser(model)


def _has_weights(folder: Path) -> bool:
    return any((folder / file).is_file() for file in (*_WEIGHTS, *_INDEXES))


def _check_weights(name: str, folder: Path) -> None:
    index = next((folder / file for file in _INDEXES if (folder / file).is_file()), None)
    if any((folder / file).is_file() for file in _WEIGHTS):
        return
    if index is None:
        raise UsageError(f"model folder `{name}` has no weights (no {_WEIGHTS[0]})")
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"`{index}` is not an index of weight files") from None
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise UsageError(
            f"model folder `{name}` lacks {len(missing)} of {len(shards)} weight files "
            f"(first: {missing[0]})"
        )


def _dtype(dtype: str, device: str, device_map: str | None) -> str | torch.dtype:
    import torch

    resolved = resolve_dtype(dtype, "cuda" if device_map and device != "cpu" else device)
    return "auto" if resolved == "auto" else getattr(torch, resolved)


def _load_config(name: str, source: str, where: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    from kvtool.cache.attention import check_supported

    config = AutoConfig.from_pretrained(source, **where)
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in AutoModelForCausalLM._model_mapping and not remote:
        raise KvtoolError(f"model `{name}` ({config.model_type}) is not a causal language model")
    check_supported(config)
    return config


def _load_tokenizer(source: str, where: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source, **where)


def _load_weights(name: str, source: str, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        source, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    if info["mismatched_keys"]:
        tensor, stored, expected = sorted(info["mismatched_keys"])[0]
        raise KvtoolError(
            f"the weights of `{name}` do not fit its config.json: {tensor} is "
            f"{tuple(stored)}, must be {tuple(expected)}"
        )
    missing = sorted(info["missing_keys"])
    if missing and any(key.endswith(".qweight") for key in info["unexpected_keys"]):
        raise KvtoolError(
            f"the weights of `{name}` are quantised (GPTQ or AWQ), and its config.json has no "
            "quantization_config that says how",
            hint=_UNQUANTISED,
        )
    if missing:
        raise KvtoolError(
            f"the weights of `{name}` lack {len(missing)} tensors of its architecture "
            f"(first: {missing[0]})"
        )
    return model


@contextlib.contextmanager
def _library_output_on_stderr(progress: bool) -> Iterator[None]:
    """Keep what libraries print while loading off stdout, and their advice quiet.

    Args:
        progress: whether the hub may show how far a download is.
    """
    from huggingface_hub.utils import enable_progress_bars
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging as transformers

    before = [(logging, logging.get_verbosity()) for logging in (hub, transformers)]
    bars = transformers.is_progress_bar_enabled()
    for logging, _ in before:
        logging.set_verbosity_error()
    _show_bars(False)
    if progress:
        enable_progress_bars()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _show_bars(bars)
        for logging, verbosity in before:
            logging.set_verbosity(verbosity)


def _show_bars(wanted: bool) -> None:
    from transformers.utils import logging

    (logging.enable_progress_bar if wanted else logging.disable_progress_bar)()


@contextlib.contextmanager
def _in_one_line(part: str, name: str, trust_remote_code: bool) -> Iterator[None]:
    """Turn whatever a library raises about a foreign checkpoint into one line with a hint."""
    try:
        yield
    except KvtoolError:
        raise
    except Exception as error:  # any: the checkpoint decides what runs
        raise _translate(part, name, error, trust_remote_code) from error


@contextlib.contextmanager
def _named_if_quantised(name: str, config: Any) -> Iterator[None]:
    """Say of weights that cannot be loaded that they are quantised, and how."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        yield
        return
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(settings.get("quant_method") or "bitsandbytes")  # which early files do not name
    try:
        yield
    except KvtoolError:
        raise
    except Exception as error:  # any: each format is a package of its own
        if _is_out_of_memory(error):
            raise
        raise KvtoolError(
            f"the weights of `{name}` are quantised with {_QUANTISED.get(method, method)}, and "
            f"cannot be loaded here: {_one_line(error)}",
            hint=_UNQUANTISED,
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _translate(part: str, name: str, error: Exception, trust_remote_code: bool) -> KvtoolError:
    if _is_out_of_memory(error):
        return KvtoolError(f"not enough memory for model `{name}`", hint="try --dtype bfloat16")
    text = " ".join(str(cause) for cause in _chain(error))
    if not trust_remote_code and "trust_remote_code" in text:
        return UsageError(
            f"model `{name}` brings its own code, which is not run unasked",
            hint="read that code, then pass --trust-remote-code",
        )
    if "does not recognize this architecture" in text or "Unrecognized model" in text:
        return KvtoolError(
            f"the architecture of model `{name}` is not supported: {_one_line(error)}"
        )
    if not Path(name).is_dir() and name != REFERENCE:
        return _translate_hub(name, text, error)
    return KvtoolError(f"cannot read the {part} of model `{name}`: {_one_line(error)}")


def _translate_hub(name: str, text: str, error: Exception) -> KvtoolError:
    if "gated repo" in text or "403 " in text:
        return KvtoolError(f"access to model `{name}` is restricted", hint="log in: hf auth login")
    if any(sign in text for sign in ("couldn't connect", "Connection", "offline", "resolve")):
        return KvtoolError(
            f"no folder `{name}` here, and the hub cannot be reached for a model of that name",
            hint="give a folder, or check the network (HF_HUB_OFFLINE, HF_ENDPOINT)",
        )
    if any(sign in text for sign in ("valid model identifier", "Repo id must", "404 ", "401 ")):
        return UsageError(
            f"no folder `{name}` here, and no model of that name on the hub",
            hint="a private model needs a login: hf auth login",
        )
    return KvtoolError(f"cannot load model `{name}`: {_one_line(error)}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _one_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    sentence = _SENTENCE_END.split(text)[0].rstrip(".")
    return sentence if len(sentence) <= 200 else sentence[:197] + "..."
