"""The format of an exported cache: a safetensors file of keys and values, and its metadata.

Tensors: `layer.{i}.keys` and `layer.{i}.values` (kv_heads, slots, head_dim), of which slot i is at
position i, and `virtual_ids` (slots,) int64. The connector runs this inside vLLM: it imports
safetensors only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.engines.vllm.ids import FEWEST

KIND, SCHEMA = "kvtool.virtual-prompt", "1"
SUFFIX = ".safetensors"
IDS = "virtual_ids"
_TEXTS = ("digest", "layers", "facts")
_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")


@dataclass(frozen=True)
class Exported:
    """An exported cache without its keys and values.

    Attributes:
        ids: the virtual ids, one a slot.
        metadata: texts by name.
        facts: what the model's configuration said; see `facts_of`.
    """

    path: Path
    ids: tuple[int, ...]
    metadata: Mapping[str, str]
    facts: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name by which a request may ask for it: that of the file, without its suffix."""
        return self.path.name.removesuffix(SUFFIX)


def exported_path(folder: Path, cache: Path, suffix: str = SUFFIX) -> Path:
    """Return where the exported form of a cache file goes in a folder.

    >>> exported_path(Path("exported"), Path("book.kv.safetensors"))
    PosixPath('exported/book.safetensors')
    """
    return folder / f"{cache.name.removesuffix(SUFFIX).removesuffix('.kv')}{suffix}"


def read_exported(path: Path) -> Exported:
    """Read the ids and metadata of an exported cache.

    Raises:
        ValueError: the file is damaged, or no exported cache that this version reads.
        OSError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if (metadata.get("kind"), metadata.get("schema_version")) != (KIND, SCHEMA):
                raise ValueError(
                    f"`{path}` is no cache that kvtool has exported as version {SCHEMA}"
                )
            ids = tuple(file.get_tensor(IDS).tolist())
        facts = json.loads(metadata["facts"])
        whole = all(name in metadata for name in _TEXTS) and isinstance(facts, dict)
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"`{path}` is not a whole file of an exported cache: {error}") from None
    if not whole or len(ids) < FEWEST:
        raise ValueError(f"`{path}` lacks a part of an exported cache")
    return Exported(path, ids, metadata, facts)


def facts_of(config: Any) -> dict[str, Any]:
    """Return what a configuration says of a model's sizes and its RoPE, as far as it says it.

    Args:
        config: of the text model, of whatever version of transformers.
    """
    heads = getattr(config, "num_attention_heads", None)
    sizes = {name: getattr(config, name, None) for name in _SIZES}
    sizes["num_key_value_heads"] = getattr(config, "num_key_value_heads", None) or heads
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if getattr(config, "rope_theta", None) is not None:
        rope = {"rope_theta": config.rope_theta, **rope}
    return {name: size for name, size in sizes.items() if size is not None} | {"rope": _plain(rope)}


def difference(made: Mapping[str, Any], found: Mapping[str, Any], of: str = "") -> str | None:
    """Say what differs between the facts of two configurations; None: nothing that both say."""
    for name in sorted(made.keys() & found.keys()):
        one, other = made[name], found[name]
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            inner = difference(one, other, f"{of}{name}.")
            if inner is not None:
                return inner
        elif one != other:
            return f"{of}{name} is {other} in the engine and {one} in the file"
    return None


def _plain(value: Any) -> Any:
    """Return what JSON holds of a value, numbers all as float."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items() if each is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return value if isinstance(value, (str, bool)) else None
