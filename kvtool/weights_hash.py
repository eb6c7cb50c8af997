"""Hash all weights of a loaded model, or all weight files of a checkpoint folder."""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kvtool.errors import KvtoolError

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_RACY = 2 * 10**9  # nanoseconds in which a file may change again and keep its time
_CHUNK = 1 << 23  # bytes read at a time
_WORDS = 64  # of 8 bytes that one number of a mark sums
_ALONE = 1 << 24  # bytes of weights below which no threads are started
_KNOWN: WeakKeyDictionary[Any, dict[tuple, str]] = WeakKeyDictionary()
"""Of a model that lives, the hash of each tensor beside the signs that it is unchanged."""


def weights_hash(source: Any) -> str:
    """Return the sha256 of all weights, as 64 hexadecimal digits.

    Of a loaded model it covers the name, dtype, shape and every byte of each parameter and each
    buffer that a checkpoint holds. They may rest on a GPU, in host memory or on disk (accelerate's
    offloading); quantised ones count with their scales. A process of a tensor-parallel model hashes
    its own part. Each tensor is hashed once: a further call sums it, which takes a tenth of the
    time, and hashes it again if its place, version counter or sums differ.

    Of a folder it covers names and bytes of the weight files that transformers would load, each
    hashed once per process and file identity (path, size, times, inode). The same weights have one
    hash as a model and another one as a folder, and another one in each dtype.

    Args:
        source: a `torch.nn.Module`, or the path of a checkpoint folder.

    Raises:
        KvtoolError: the folder holds no weight files, or they cannot be read.
    """
    if isinstance(source, torch.nn.Module):
        return _hash_model(source)
    return _hash_folder(Path(os.path.realpath(source)))


def _hash_model(model: torch.nn.Module) -> str:
    leaves = [(name, leaf, _spot(name, leaf)) for name, leaf in _leaves(model)]
    once = {spot: leaf for _, leaf, spot in leaves}  # tied weights have one place and many names
    known = _KNOWN.get(model, {})
    size = sum(leaf.nbytes for leaf in once.values() if isinstance(leaf, Tensor))
    with torch.no_grad():
        if size < _ALONE:
            found = [_hash_leaf(leaf, known) for leaf in once.values()]
        else:
            with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing frees the interpreter
                found = list(pool.map(lambda leaf: _hash_leaf(leaf, known), once.values()))
    _KNOWN[model] = {key: digest for key, digest in found if key is not None}
    hashes = dict(zip(once, (digest for _, digest in found), strict=True))
    lines = sorted(f"{name} {hashes[spot]}" for name, _, spot in leaves)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _spot(name: str, leaf: Any) -> tuple:
    """Where a tensor is; everything else is identified by its name."""
    if not isinstance(leaf, Tensor) or leaf.is_meta:
        return (name,)
    return leaf.data_ptr(), str(leaf.device), leaf.dtype, leaf.shape, leaf.stride()


def _leaves(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and content of all that a checkpoint of the model would hold."""
    offloaded = dict(_offloaded(model))
    for name, value in model.state_dict().items():
        shown = name.replace("_orig_mod.", "")  # which torch.compile adds
        if isinstance(value, Tensor) and value.is_meta and name in offloaded:
            yield shown, offloaded[name]
        else:
            yield from _plain(shown, value)


def _offloaded(model: torch.nn.Module) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Calls that read the weights which accelerate keeps elsewhere while no layer runs."""
    for prefix, module in model.named_modules():
        hooks = [getattr(module, "_hf_hook", None)]
        hooks += getattr(hooks[0], "hooks", ())  # of several in a row
        for hook in hooks:
            weights = getattr(hook, "weights_map", None)
            if weights is None:
                continue
            deep = getattr(hook, "place_submodules", False)
            tensors = module.state_dict(keep_vars=True) if deep else _own_tensors(module)
            for name, tensor in tensors.items():
                if tensor.is_meta and name in weights:
                    whole = f"{prefix}.{name}" if prefix else name
                    yield whole, partial(weights.__getitem__, name)


def _own_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }


def _plain(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Take apart what is not one dense tensor: parts of processes, quantised and nested values."""
    if isinstance(value, DTensor):
        yield f"{name}:placements", str(value.placements)
        yield from _plain(name, value.to_local())
    elif isinstance(value, Tensor) and value.is_quantized:
        scheme = value.qscheme()
        yield f"{name}:scheme", str(scheme)
        yield f"{name}:codes", value.int_repr()
        if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            yield f"{name}:scale", f"{value.q_scale()} {value.q_zero_point()}"
        else:
            yield f"{name}:scale", value.q_per_channel_scales()
            yield f"{name}:zero", value.q_per_channel_zero_points()
    elif isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        for part in value.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{part}", getattr(value, part))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _plain(f"{name}.{key}", item)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _plain(f"{name}.{i}", item)
    elif isinstance(value, Tensor):
        yield name, value if value.layout == torch.strided else value.to_dense()
    elif isinstance(value, io.BytesIO):
        yield name, repr(value.getvalue())
    else:
        simple = isinstance(value, (str, bytes, int, float, torch.dtype, type(None)))
        yield name, repr(value) if simple else type(value).__name__


def _hash_leaf(leaf: Any, known: Mapping[tuple, str]) -> tuple[tuple | None, str]:
    """Return the signs that a tensor is unchanged, and its hash."""
    if callable(leaf):
        leaf = leaf()
    if not isinstance(leaf, Tensor):
        return None, hashlib.sha256(leaf.encode()).hexdigest()
    label = f"{leaf.dtype} {list(leaf.shape)}"
    if leaf.is_meta:  # no numbers anywhere
        return None, hashlib.sha256(f"{label} meta".encode()).hexdigest()
    plain = as_bytes(leaf)
    version = None if leaf.is_inference() else leaf._version
    key = (leaf.data_ptr(), str(leaf.device), version, label, _mark(plain))
    digest = known.get(key)
    if digest is None:
        whole = hashlib.sha256(label.encode())
        whole.update(plain.cpu().numpy().data)
        digest = whole.hexdigest()
    return key, digest


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes in order, without a copy where it is in one piece."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    flat = plain.reshape(-1)
    if flat.stride(0) != 1:  # one number with a stride of its own
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _mark(plain: Tensor) -> bytes:
    """Sums of every 512 bytes: an edit that leaves the version counter alone alters them.

    `weight.data.mul_(2)` is such an edit. Summing takes a tenth of the time of hashing.
    """
    whole = plain.numel() // (8 * _WORDS) * (8 * _WORDS)
    body, tail = plain[:whole], plain[whole:]
    if body.data_ptr() % 8:
        body = body.clone()
    sums = body.view(torch.int64).view(-1, _WORDS).sum(1)
    digest = hashlib.sha256(sums.cpu().numpy().data)
    digest.update(tail.cpu().numpy().data)
    return digest.digest()


def _hash_folder(folder: Path) -> str:
    try:
        lines = [f"{name} {_hash_file(folder / name)}" for name in _weight_files(folder)]
    except OSError as error:
        raise KvtoolError(
            f"cannot read the weights in `{folder}`: {error.strerror or error}"
        ) from error
    if not lines:
        raise KvtoolError(f"`{folder}` holds no weight files")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _weight_files(folder: Path) -> list[str]:
    """Names of the files that transformers would load, or else of all that may hold weights."""
    for single, index in zip(_SINGLE, _INDEXES, strict=True):
        if (folder / single).is_file():
            return [single]
        if (folder / index).is_file():
            try:
                shards = set(json.loads((folder / index).read_bytes())["weight_map"].values())
            except (ValueError, KeyError, TypeError, AttributeError):
                raise KvtoolError(f"`{folder / index}` is not an index of weight files") from None
            return [index, *sorted(map(str, shards))]
    return sorted(path.name for path in folder.iterdir() if path.suffix in _SUFFIXES)


def _hash_file(path: Path) -> str:
    identity = _identity(path, os.stat(path))
    if time.time_ns() - max(identity[2:4]) < _RACY:
        return _hash_bytes.__wrapped__(identity)
    return _hash_bytes(identity)


def _identity(path: str | Path, status: os.stat_result) -> tuple:
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return str(path), status.st_size, *times, status.st_dev, status.st_ino


@lru_cache(maxsize=4096)
def _hash_bytes(identity: tuple) -> str:
    digest, buffer = hashlib.sha256(), bytearray(_CHUNK)
    with open(identity[0], "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(memoryview(buffer)[:size])
        if _identity(identity[0], os.fstat(file.fileno())) != identity:
            raise KvtoolError(f"`{identity[0]}` is being written while it is read")
    return digest.hexdigest()
