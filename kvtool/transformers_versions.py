"""Differences between the releases of transformers that kvtool runs on, 5.17 and later.

The only file that knows; each difference names the release that ends it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping
from typing import Any

from kvtool.errors import KvtoolError

OLDEST = (5, 17)
_PLAIN = ("5.17.", "5.23.", "5.24.")  # releases that `kvtool.plain_config` reads a config.json like
_WINDOWS = {
    "sliding_attention": "sliding_window",
    "hybrid_sliding": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
_STATES = ("conv", "linear_attention", "hybrid", "hybrid_sliding")


@functools.cache
def check_transformers() -> None:
    """Refuse a transformers that is older than kvtool runs on, without importing it."""
    oldest = ".".join(map(str, OLDEST))
    hint = f"pip install 'transformers>={oldest}'"
    found = _installed()
    if found is None:
        raise KvtoolError("transformers is not installed", hint=hint)
    if _release(found) < OLDEST:
        raise KvtoolError(
            f"transformers {found} is installed, and kvtool runs on {oldest} or later", hint=hint
        )


def _installed() -> str | None:
    """Return the version of transformers, which is not imported; None: there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


def gguf_splits() -> Collection[str]:
    """Return the rules by which a GGUF file splits text that transformers knows, by name.

    Raises:
        KvtoolError: releases before 5.18 split the text of some files by other rules.
    """
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        hint = "pip install 'transformers>=5.18'"
        raise KvtoolError("GGUF files need transformers 5.18 or later", hint=hint) from None
    return GGUF_PRE_TOKENIZER_SPLITS.keys()


def _release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version, later ones than any where it has none."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (2**31, 0) if numbers is None else (int(numbers[1]), int(numbers[2]))


@functools.cache
def cache_argument() -> str:
    """Return what forwards and `generate` call their cache: before 5.24, `past_key_values`."""
    return "past_key_values" if _release(_installed() or "") < (5, 24) else "cache"


@functools.cache
def eager_families() -> tuple[str, ...]:
    """Return the families whose attention cannot be exchanged, only watched.

    Releases before 5.24 have an attention of its own for GPT-J.
    """
    return ("falcon", "gptj") if cache_argument() == "past_key_values" else ("falcon",)


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a forward or of `generate`, None where it has none.

    From 5.24 on, callers may use its former name as well.
    """
    cache = arguments.get("cache")
    return arguments.get("past_key_values") if cache is None else cache


def with_cache(arguments: Mapping[str, Any], cache: object) -> dict[str, Any]:
    """Return arguments that pass a cache on, by the name that the installed release gives it."""
    others = {name: value for name, value in arguments.items() if name != "past_key_values"}
    return others | {cache_argument(): cache}


def returned_cache(output: object) -> Any:
    """Return the cache that the output of a forward names, None where it names none.

    From 5.24 on, its former name warns.
    """
    return output.cache if hasattr(output, "cache") else getattr(output, "past_key_values", None)


def reads_plain_configs() -> bool:
    """Return whether transformers reads a config.json as `kvtool.plain_config` does."""
    return (_installed() or "").startswith(_PLAIN)


def layer_types(config: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the kind of every cache layer and the arguments that make it.

    Releases before 5.19 give the arguments once for all layers, those of all kinds together; those
    before 5.23 leave out layers that share the cache of another.
    """
    from kvtool.plain_config import PlainConfig

    if isinstance(config, PlainConfig):
        return config.cache_layers()
    from transformers.cache_utils import get_layer_types_and_kwargs

    kinds, options = get_layer_types_and_kwargs(config)
    if isinstance(options, dict):
        options = [_options_of(kind, config, options) for kind in kinds]
    shared = config.num_hidden_layers - len(kinds)
    return [*zip(kinds, options, strict=True), *[("dummy", {})] * shared]


def _options_of(kind: str, config: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of one layer out of those of all."""
    own = {}
    if kind in _WINDOWS:
        own["sliding_window"] = getattr(config, _WINDOWS[kind])
    if kind in _STATES:
        own["number_of_states"] = options.get("number_of_states", 1)
    if "config" in options:
        own["config"] = options["config"]
    return own


def stock_layers(kind: str, options: dict[str, Any]) -> list[Any]:
    """Make transformers' own cache layer of a kind.

    Returns:
        The layer; nothing for one that shares the cache of another, before 5.23.
    """
    from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

    if kind == "dummy" and kind not in DYNAMIC_LAYER_TYPE_MAPPING:
        return []
    return [DYNAMIC_LAYER_TYPE_MAPPING[kind](**options)]


def kv_sharing_layers(config: Any) -> frozenset[int]:
    """Return the layers whose keys and values later ones read, whose modes 5.23 names.

    Before it, the last layers read those of the last one before them of their own kind.
    """
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is not None:
        return frozenset(i for i, mode in enumerate(modes) if mode == "store")
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    own = config.num_hidden_layers - shared
    kinds = [kind for kind, _ in layer_types(config)][:own] if shared else []
    return frozenset({kind: i for i, kind in enumerate(kinds)}.values())


def tensor_parallel_group(model: Any) -> Any | None:
    """Return the processes that a model's heads are split over, None where they are not.

    Releases before 5.23 do not name the axes of a mesh that has one.
    """
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "tp_size", None) or 1) == 1:
        return None
    return (mesh["tp"] if mesh.mesh_dim_names else mesh).get_group()
