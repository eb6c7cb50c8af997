"""Choose where and how a model runs: device, dtype, attention kernel, processes.

The choice compares the bytes of the weights, known before they are loaded, with the memory that is
free.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvtool.errors import KvtoolError, UsageError
from kvtool.lazy_torch import torch
from kvtool.model_shape import layer_shapes, quantised_by, stored_dtype
from kvtool.models.folder import find_source, in_one_line, library_output_on_stderr
from kvtool.models.quantised import COUNTED, linear_layers, spared_bytes
from kvtool.planning.parameters import Bits, folder_bytes, is_quantised
from kvtool.processes import started

_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def resolve_device(device: str, device_map: str | None = None, *, elsewhere: bool = False) -> str:
    """Turn `auto` into a device of this machine, and refuse one that it does not have.

    Of several processes on a machine, each takes a GPU of its own for `auto`.
    """
    if elsewhere:
        return "cuda"
    if device == "auto" and device_map is None and _has_no_cuda():
        return "cpu"
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


def _has_no_cuda() -> bool:
    """Return whether torch, which nothing has imported so far, is a build for CPUs alone."""
    return "torch" not in sys.modules and version("torch").endswith("+cpu")


def _check_device(device: str, flag: str, wrong: str, besides: Sequence[str]) -> None:
    """Refuse what is no device, and one that this machine does not have."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise UsageError(
            f"{wrong}; choose {', '.join(besides)}, cpu, cuda, cuda:0 "
            "or another device of torch (mps, xpu ..)"
        ) from None
    if kind == "cpu":
        return
    module = getattr(torch, kind, None)  # the kinds that this torch was not built for have none
    count = module.device_count() if module is not None and module.is_available() else 0
    if int(device.partition(":")[2] or 0) >= count:
        raise UsageError(f"{wrong}: {count} {kind.upper()} devices here", hint=f"{flag} cpu")


def resolve_dtype(dtype: str, device: str) -> str:
    """Say what `auto` means on a device: `float32` on a CPU, the checkpoint's own (`auto`) else."""
    return "float32" if dtype == "auto" and device == "cpu" else dtype


def torch_dtype(dtype: str, device: str, device_map: str | None) -> str | torch.dtype:
    resolved = resolve_dtype(dtype, "cuda" if device_map and device != "cpu" else device)
    return "auto" if resolved == "auto" else getattr(torch, resolved)


def check_attention(attn_implementation: str, device: str) -> None:
    """Refuse an attention kernel that this machine cannot run."""
    if attn_implementation != "flash_attention_2":
        return
    if find_spec("flash_attn") is None:
        raise UsageError(
            "--attn-implementation flash_attention_2 needs the flash-attn package",
            hint="pip install 'kvtool[flash]'",
        )
    if device.partition(":")[0] != "cuda":
        raise UsageError(
            f"--attn-implementation flash_attention_2 needs a CUDA device, not {device}"
        )


def check_processes(device: str, device_map: str | None) -> None:
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


def split_over_processes(config: Any) -> dict[str, Any]:
    """Return transformers' arguments for splitting a model over all processes.

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


_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")  # limits of a container
_GROUP_OLD = Path("/sys/fs/cgroup/memory")


def free_memory(device: str, *, spread: bool = False) -> tuple[str, int | None]:
    """Name a device and count its free bytes.

    Args:
        device: `cpu`, `cuda`, `cuda:1` or another one of torch; `mps` has the machine's memory.
        spread: whether a model is spread over all GPUs, if there are any.

    Returns:
        The device or devices, and None where the system does not say.
    """
    kind = torch.device(device).type
    if kind in ("cpu", "mps") or (kind == "cuda" and not torch.cuda.is_available()):
        return "cpu" if kind == "cuda" else kind, _free_ram()
    if kind != "cuda":
        free_and_total = getattr(getattr(torch, kind, None), "mem_get_info", None)
        return device, None if free_and_total is None else free_and_total(device)[0]
    places = [torch.device(device)]
    if spread:
        places = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    free = sum(torch.cuda.mem_get_info(place)[0] for place in places)
    return " + ".join(map(str, places)), free


def room_beside(model: Any) -> int | None:
    """Return the half of the free memory that sequences may take; prompts are read in the other."""
    _, free = free_memory(str(model.device), spread=hasattr(model, "hf_device_map"))
    return None if free is None else free // 2


def memory_of(device: str, memory: int | None, *, spread: bool = False) -> tuple[str, int | None]:
    """Name a device and count its bytes: those that are given, else those that are free."""
    return free_memory(device, spread=spread) if memory is None else (device, memory)


def _free_ram() -> int | None:
    """Return the memory that a process may still take; what only caches files is free."""
    found = [_of_machine(), _of_group(_GROUP, "memory.max", "memory.current", "inactive_file")]
    names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    found.append(_of_group(_GROUP_OLD, *names))
    return min((each for each in found if each is not None), default=None)


def _of_machine() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in _MEMORY.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _of_group(folder: Path, limit: str, used: str, cached: str) -> int | None:
    """Return what the limit of a control group leaves; None: no such group, or no limit."""
    try:
        most, now = (int((folder / name).read_text()) for name in (limit, used))
        lines = (folder / "memory.stat").read_text().splitlines()
        files = next((int(line.split()[1]) for line in lines if line.startswith(f"{cached} ")), 0)
    except (OSError, ValueError):  # `max` where there is no limit
        return None
    return max(0, most - now + files)


def weight_bytes(
    config: Any,
    dtype: str,
    where: Mapping[str, Any] = MappingProxyType({}),
    *,
    bits: Bits | None = None,
    name: str | None = None,
    device: str | None = None,
) -> int | None:
    """Count the bytes of a model's weights and buffers from its configuration.

    The model is built without memory for its tensors; weights that are tied count once.

    Args:
        config: a transformers configuration.
        dtype: in which it runs, by name; `auto`: the checkpoint's own.
        where: how the checkpoint is asked for, in transformers' words.
        bits: in which bitsandbytes stores linear layers; None: those of the dtype.
        name: of the model, whose files say what other quantised weights than fp8 and mxfp4 take.
        device: for the model; a CPU holds fp8 and mxfp4 in the dtype. None: a GPU.

    Returns:
        None where the weights are quantised, and their files are not here or `bits` are asked for.

    Raises:
        KvtoolError: no model can be built from the configuration.
    """
    counted = quantised_by(config) in COUNTED
    if is_quantised(config) and (bits is not None or not counted):
        if name is None or bits is not None or not (source := find_source(name)).is_here:
            return None
        return folder_bytes(Path(source.place))
    from transformers import AutoModelForCausalLM

    wanted = getattr(torch, stored_dtype(config, dtype))
    with (
        library_output_on_stderr(progress=False),
        in_one_line("configuration", config.name_or_path, where),
        torch.device("meta"),
    ):
        more = {name: value for name, value in where.items() if name != "revision"}
        model = AutoModelForCausalLM.from_config(config, dtype=wanted, **more)
        on_gpu = counted and (device or "cuda").split(":")[0] not in ("cpu", "mps")
        spared = spared_bytes(model, config, wanted.itemsize) if on_gpu else 0
    tensors = {id(each): each for each in [*model.parameters(), *model.buffers()]}
    whole = sum(each.numel() * each.element_size() for each in tensors.values())
    if bits is None:
        return whole - spared
    layers = linear_layers(model)
    return whole + sum(each.bytes(bits) - each.numbers * wanted.itemsize for each in layers)
