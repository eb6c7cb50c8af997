"""Hash the weights of a loaded model by sums over all of them, wherever they rest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

_WORDS = 64  # of 8 bytes that one number of a hash sums


def weights_hash(model: torch.nn.Module) -> str:
    """Return the sha256 of all weights, as 64 hexadecimal digits.

    It covers the name, dtype and shape of each parameter and each buffer that a checkpoint holds,
    and the sums of every 512 of its bytes. So it reads all weights once, and any edit changes it
    but one that moves 8 bytes at a time within 512. They may rest on a GPU, in host memory or on
    disk (accelerate's offloading); quantised ones count with their scales. A process of a
    tensor-parallel model hashes its own part.
    """
    digest = hashlib.sha256()
    with torch.no_grad():
        for name, value in sorted(_weights(model), key=lambda weight: weight[0]):
            digest.update(name.encode())
            for leaf in tree_leaves(value):
                _add(digest, leaf)
    return digest.hexdigest()


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and content of all that a checkpoint of the model would hold."""
    offloaded = dict(_offloaded(model))
    for name, value in model.state_dict().items():
        weights, key = offloaded.get(name, ({}, ""))
        yield name.replace("_orig_mod.", ""), weights[key] if key else value  # of torch.compile


def _offloaded(model: torch.nn.Module) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Where accelerate keeps weights while no layer runs, and under which name there."""
    for prefix, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        for each in (hook, *getattr(hook, "hooks", ())):  # of several in a row
            weights = getattr(each, "weights_map", None) or {}
            for name, tensor in module.state_dict(keep_vars=True).items():
                if isinstance(tensor, Tensor) and tensor.is_meta and name in weights:
                    yield f"{prefix}.{name}" if prefix else name, (weights, name)


def _add(digest: Any, leaf: Any) -> None:
    """Count one tensor, or a part of a quantised one, into a hash."""
    leaf = local_part(leaf)
    if isinstance(leaf, Tensor) and hasattr(leaf, "__tensor_flatten__"):
        for part in leaf.__tensor_flatten__()[0]:
            _add(digest, getattr(leaf, part))
        return
    if not isinstance(leaf, Tensor):
        digest.update(repr(leaf).encode() if isinstance(leaf, (str, int, float)) else b"")
        return
    digest.update(f"{leaf.dtype} {list(leaf.shape)}".encode())
    if not leaf.is_meta:
        leaf = leaf.dequantize() if leaf.is_quantized else leaf
        _add_sums(digest, as_bytes(leaf if leaf.layout == torch.strided else leaf.to_dense()))


def _add_sums(digest: Any, plain: Tensor) -> None:
    whole = plain.numel() // (8 * _WORDS) * (8 * _WORDS)
    body, tail = plain[:whole], plain[whole:]
    if body.data_ptr() % 8:
        body = body.clone()
    digest.update(body.view(torch.int64).view(-1, _WORDS).sum(1).cpu().numpy().data)
    digest.update(tail.cpu().numpy().data)


def local_part(weight: Any) -> Any:
    """Return the part of a weight that this process holds, if it is split over processes."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes in order, without a copy where it is in one piece."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    flat = plain.reshape(-1)
    if flat.stride(0) != 1:  # one number with a stride of its own
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
