"""Load weights in fewer bits with bitsandbytes, or say in one line why that cannot be done.

Only linear layers are stored so; embeddings, output head, norms and experts keep their dtype.
Attention, and the cache with it, computes in the model's dtype.
"""

from __future__ import annotations

import logging
from typing import Any

from kvtool.errors import UsageError
from kvtool.extras import require
from kvtool.lazy_torch import torch
from kvtool.model_shape import quantised_by, stored_dtype
from kvtool.planning.parameters import Bits, Matrix, is_quantised

COUNTED = ("fp8", "mxfp4")
"""Methods whose bytes follow from the configuration, as transformers holds them on a GPU."""

_KINDS = ("cpu", "cuda", "xpu")  # of devices that bitsandbytes runs on
_SCALE = 4  # bytes of the scale of a block in fp8


def check_quantise(device: str, *, split: bool) -> None:
    """Refuse to load weights in fewer bits on a device, or in a way, that cannot do so."""
    kind = device.partition(":")[0]
    if kind not in _KINDS:
        raise UsageError(f"--quantize runs on {', '.join(_KINDS)}, not on {kind}")
    if split:
        raise UsageError("--quantize and --tensor-parallel exclude each other; keep one")
    require("bitsandbytes", needed_by="--quantize")


def check_plain(name: str, config: Any) -> None:
    """Refuse to quantise a checkpoint that is quantised already."""
    if is_quantised(config):
        raise UsageError(
            f"the weights of `{name}` are quantised already", hint="leave out --quantize"
        )


def loading_options(
    config: Any, bits: Bits | None, device: str, dtype: str | torch.dtype
) -> dict[str, Any]:
    """Return transformers' arguments for weights in fewer bits, none for others.

    bitsandbytes puts weights on their device while it rounds them, so that this is said as well.

    Args:
        bits: None for what the checkpoint says.
        dtype: in which the other weights are, and linear layers compute.
    """
    if bits is None:
        return {"device_map": {"": device}} if quantised_by(config) == "bitsandbytes" else {}
    from transformers import BitsAndBytesConfig

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns at every product
    if not isinstance(dtype, torch.dtype):
        dtype = getattr(torch, stored_dtype(config, dtype))
    settings = BitsAndBytesConfig(load_in_8bit=True)
    if bits == "4bit":
        settings = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    return {"quantization_config": settings, "device_map": {"": device}}


def linear_layers(model: torch.nn.Module) -> list[Matrix]:
    """Return the layers of a model that bitsandbytes stores in fewer bits: all but the head."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()  # type: ignore[operator]
    found = []
    for module in model.modules():
        if type(module) in (torch.nn.Linear, Conv1D) and module is not head:
            rows, columns = module.weight.shape  # type: ignore[misc]
            found.append(Matrix(rows, columns))
    return found


def spared_bytes(model: torch.nn.Module, config: Any, itemsize: int) -> int:
    """Count the bytes that a checkpoint spares against all of its weights in the model's dtype.

    fp8 takes a byte a weight and a float32 for each of its blocks, mxfp4 half a byte and a byte for
    each 32 weights. Layers that predict several tokens at once (MTP) are not loaded.

    Args:
        model: whole, in the model's dtype; its tensors need no memory.
        config: of a checkpoint that one of `COUNTED` has quantised.
        itemsize: bytes of a number in that dtype.
    """
    from transformers.quantizers import AutoHfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    found = AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
    settings = found.quantization_config
    fp8, names = quantised_by(config) == "fp8", getattr(settings, "modules_to_not_convert", None)
    left = found.get_modules_to_not_convert(model, names, model._keep_in_fp32_modules)
    four = not fp8 or getattr(settings, "expert_dtype", None) == "fp4"
    spared = 0
    for name, module in model.named_modules():
        experts = name.endswith(".experts")
        if not (experts or (fp8 and type(module) is torch.nn.Linear)):
            continue
        if not should_convert_module(name, left):
            continue
        for weight in module.parameters(recurse=False):
            if weight.ndim != (3 if experts else 2):
                continue  # a bias
            rows, columns = weight.shape[-2:]
            high, wide = getattr(settings, "weight_block_size", None) or (rows, columns)
            held = rows * columns + _SCALE * -(-rows // high) * -(-columns // wide)
            if experts and four:
                held = rows * (columns // 2 + columns // 32)
            spared += weight.numel() // (rows * columns) * (rows * columns * itemsize - held)
    return spared
