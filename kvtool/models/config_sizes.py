"""Refuse a config.json whose sizes no model can have, before anything is made of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvtool.documents.tree import DEEPEST
from kvtool.errors import KvtoolError, quote

MOST_LAYERS = 1000
MOST_HEADS = 10_000
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")
_HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    *("num_key_value_heads", "num_kv_heads"),
)
_SIZES = (
    *("hidden_size", "n_embd", "d_model", "vocab_size", "head_dim", "v_head_dim"),
    *("max_position_embeddings", "n_positions", "max_seq_len"),
    *("sliding_window", "attention_chunk_size"),
)
_OR_NONE = (  # sizes of parts that a model may do without
    *("intermediate_size", "n_inner", "num_experts", "num_local_experts"),
    *("kv_lora_rank", "qk_rope_head_dim"),
)
_BOUNDS = {
    **dict.fromkeys(_LAYERS, (1, MOST_LAYERS)),
    **dict.fromkeys(_HEADS, (1, MOST_HEADS)),
    **dict.fromkeys(_SIZES, (1, 2**40)),
    **dict.fromkeys(_OR_NONE, (0, 2**40)),
}
_FACTOR_LISTS = ("short_factor", "long_factor")
_FACTORS = (
    *("rope_theta", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", *_FACTOR_LISTS),
)
_TEXT_PARTS = ("text_config", "decoder", "llm_config", "language_config", "thinker_config")


def check_sizes(name: str, data: Mapping[str, Any]) -> None:
    """Refuse sizes that are numbers, but not of layers, heads or tokens.

    An entry of another kind (a list for each layer, nothing) is left to who reads it.
    """
    texts = [data, *(data.get(key) for key in _TEXT_PARTS)]
    for part in _parts(name, data):
        text = any(part is each for each in texts)
        unused = {"head_dim"} if part.get("kv_lora_rank") else set()
        unused |= {"sliding_window"} if part.get("use_sliding_window") is False else set()
        for key in _BOUNDS if text else _LAYERS:
            value: Any = part.get(key)
            least, most = _BOUNDS[key]
            least = least if text and key not in unused else 0
            if type(value) not in (int, float):
                continue
            if not least <= value <= most or value != int(value):
                raise _refuse(name, key, value, f"give a whole number from {least} to {most:,}")
        for key in _FACTORS:
            value = part.get(key)
            many = key in _FACTOR_LISTS and isinstance(value, list)
            if not all(map(_is_factor, value if many else [value])):
                raise _refuse(name, key, value, "give numbers that are not negative")


def _is_factor(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value) and value >= 0)


def _refuse(name: str, key: str, value: Any, hint: str) -> KvtoolError:
    shown = f"the config.json of model `{name}` gives {key} as {quote(value)}"
    return KvtoolError(shown, hint=hint)


def _parts(name: str, value: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield all mappings within a configuration, itself included."""
    if depth > DEEPEST:
        raise KvtoolError(
            f"the config.json of model `{name}` is nested more than {DEEPEST} levels deep"
        )
    if isinstance(value, Mapping):
        yield value
    inner = value.values() if isinstance(value, Mapping) else value
    for item in inner if isinstance(inner, Iterable) else ():
        if isinstance(item, (Mapping, list)):
            yield from _parts(name, item, depth + 1)
