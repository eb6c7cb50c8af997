"""The format of a cache file: one safetensors file with metadata.

The metadata name the model, the policy and the budget. They are checked before anything is built.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvtool.cache.tensor_files.tensor_file import DamagedFile, TensorFile
from kvtool.cache.whole.cache import KVCache
from kvtool.errors import KvtoolError, UsageError
from kvtool.sizes import MOST_TOKENS
from kvtool.weights_hash import local_part, weights_hash

_TEXTS = ("policy", "budget", "prefill", "model", "config_hash", "weights", "kvtool")


def check_metadata(path: Path, metadata: Mapping[str, str]) -> None:
    """Refuse a file that lacks a text, or whose counts of tokens are none."""
    for name in _TEXTS:
        if name not in metadata:
            raise bad_file(path, f"`{name}` is missing")
    counts = []
    for name in ("tokens_seen", "seen"):
        text = metadata.get(name, "")
        if not (text.isascii() and text.isdecimal() and len(text) <= 10):
            raise bad_file(path, f"`{name}` is no number of tokens")
        counts.append(int(text))
    if not 1 <= counts[0] <= counts[1] <= MOST_TOKENS:
        raise bad_file(path, f"{counts[0]} tokens of {counts[1]} seen")


def bad_file(path: Path, what: str) -> KvtoolError:
    """Return the error of a file that is whole and cannot be a cache."""
    return KvtoolError(f"`{path}` is not a sound cache file: {what}")


KIND, SCHEMA = "kvtool.cache", "1"


def read_metadata(path: str | Path) -> dict[str, str]:
    """What a cache file says of itself, without its tensors.

    Raises:
        KvtoolError: no such file, or not a cache file.
    """
    metadata = read_file(Path(path), with_tensors=False)[0]
    check_metadata(Path(path), metadata)
    return metadata


def read_file(path: Path, *, with_tensors: bool) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read a file's metadata, and its tensors if they are wanted."""
    if not path.is_file():
        raise KvtoolError(f"no cache file at `{path}`")
    try:
        with path.open("rb", buffering=0) as raw:
            file = TensorFile(raw)
            _check_kind(path, file.metadata)
            names = file.names if with_tensors else []
            return file.metadata, {name: file.read(name) for name in names}
    except DamagedFile as error:
        raise KvtoolError(
            f"`{path}` is not a whole cache file: it is truncated or damaged"
        ) from error
    except OSError as error:
        raise KvtoolError(f"cannot read `{path}`: {error.strerror or error}") from error


def _check_kind(path: Path, metadata: dict[str, str]) -> None:
    if metadata.get("kind") != KIND:
        raise KvtoolError(f"`{path}` is not a kvtool cache file")
    if metadata.get("schema_version") != SCHEMA:
        raise KvtoolError(
            f"`{path}` has schema version {metadata.get('schema_version')}; "
            f"this kvtool reads {SCHEMA}"
        )


def check_one_process(cache: KVCache) -> None:
    """Refuse a cache whose heads are spread over processes."""
    if cache.link.shards.processes > 1:
        raise UsageError(
            "a cache file holds all KV heads, and each of the "
            f"{cache.link.shards.processes} processes has its own",
            hint="save and load caches in one process",
        )


def weights_labels(model: PreTrainedModel) -> dict[str, str]:
    """What a file says of the weights that made it: a hash of all, and the one of older files."""
    return {"weights": weights_fingerprint(model), "weights_hash": weights_hash(model)}


def has_weights(model: PreTrainedModel, metadata: Mapping[str, str]) -> bool:
    """Return whether a model has the weights of a file, which may be older than the whole hash."""
    whole = metadata.get("weights_hash")
    if whole is None:
        return metadata["weights"] == weights_fingerprint(model)
    return whole == weights_hash(model)


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Hash of the dtype and eight numbers of every weight, which every file holds."""
    sample = [
        weight.detach().flatten()[:8].float().to(model.device)
        for weight in map(local_part, model.parameters())
        if not weight.is_meta
    ]
    numbers = torch.cat(sample).cpu().numpy().tobytes() if sample else b""
    return hashlib.sha256(str(model.dtype).encode() + numbers).hexdigest()
