"""A device `cuda` that is not there: torch's compiler writes the code of an H200 for fake tensors.

This needs no GPU and no torch with CUDA support. Torch is given answers here in place of those of a
driver, and hands the code over in place of running it. Two things differ from a real device: the
kernel of sdpa is chosen here, and nothing is timed in order to be chosen (padding, `max_autotune`).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda:0")
H200 = SimpleNamespace(
    name="NVIDIA H200",
    type="cuda",
    index=0,
    major=9,
    minor=0,
    cc=90,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=141 << 30,
    L2_cache_size=50 << 20,
    shared_memory_per_multiprocessor=233472,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    gcnArchName="",
)
_DEVICE = {
    "device_count": 1,
    "current_device": 0,
    "get_device_properties": H200,
    "get_device_capability": (9, 0),
    "is_bf16_supported": True,
    "set_device": None,
    "synchronize": None,
}
_INTERFACE = {"is_available": True, "get_compute_capability": 90}
_INTERFACE |= {"is_triton_capable": True, "raise_if_triton_unavailable": None}
_TRITON = {"has_triton": True, "triton_hash_with_backend": "none", "triton_backend": None}
_sdpa = torch.nn.functional.scaled_dot_product_attention


class Written(Exception):
    """The code of a graph, as the only argument; it is not run."""


def pretend_device() -> None:
    """Pretend the device for the rest of this process."""
    import torch._dynamo.device_interface as interfaces
    import torch._inductor.config as settings
    import torch._inductor.scheduler as scheduler
    import torch._inductor.utils as utils
    import torch.utils._triton as triton_support
    from torch._inductor.graph import GraphLowering

    _guard_devices()
    cuda = interfaces.CudaInterface
    for name, value in _DEVICE.items():
        setattr(torch.cuda, name, _say(value))
    for name, value in (_DEVICE | _INTERFACE).items():
        setattr(cuda, name, staticmethod(_say(value)))
    for name in ("get_device_properties", "current_device"):
        setattr(cuda.Worker, name, staticmethod(_say(_DEVICE[name])))
    for module in (triton_support, utils, scheduler):
        for name in _TRITON.keys() & vars(module).keys():
            setattr(module, name, _say(_TRITON[name]))
    logging.getLogger("torch._inductor.utils").setLevel(logging.ERROR)  # "on error, .. kept"
    settings.force_disable_caches = True
    settings.compile_threads = 1
    settings.shape_padding = False  # which both run on the device
    settings.joint_graph_constant_folding = False
    GraphLowering.compile_to_module = _hand_over
    torch.nn.functional.scaled_dot_product_attention = _attend


def _say(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _guard_devices() -> None:
    """Give CUDA devices the guard of `meta`, which does nothing, for a torch that has none."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 15).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # numbers of c10::DeviceType
    guards[cuda] = guards[meta]


def _hand_over(graph: Any) -> None:
    wrapper = graph.codegen()[0]
    raise Written(getattr(wrapper, "value", wrapper))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Do as sdpa does on the device: flash without a mask, else memory-efficient."""
    if not query.is_cuda:
        how = {"scale": scale, "enable_gqa": enable_gqa}
        return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, **how)
    if attn_mask is None:
        causal = is_causal and query.shape[2] > 1
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, 0.0, causal, scale=scale)[0]
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, False, scale=scale)[0]


class OnDevice(TorchFunctionMode):
    """Deep copies of tensors, made inside, are fake ones on the device."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        own, copies = args
        if id(own) not in copies:
            form = {"dtype": own.dtype, "device": CUDA}
            with self._mode:
                copies[id(own)] = torch.empty_strided(own.shape, own.stride(), **form)
        return copies[id(own)]


def written_code(compiled: Callable[[], Any]) -> str:
    """Return the code that a compiled call would run; the call is not compiled further."""
    try:
        compiled()
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, Written):
            cause = getattr(cause, "inner_exception", None) or cause.__cause__ or cause.__context__
        if cause is None:
            raise
        return str(cause.args[0])
    raise AssertionError("what was only to be written has run")
