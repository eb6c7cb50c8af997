"""Refuse a config.json whose sizes no model can have, before anything is made of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvtool.documents.tree import DEEPEST
from kvtool.errors import KvtoolError, quote

MOST_LAYERS = 1000
MOST_HEADS = 10_000
_LARGEST = 2**40  # of any other size
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
_ROPES = ("rope_parameters", "rope_scaling")
_ROPE_NUMBERS = (
    *("rope_theta", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
)
_ROPE_LISTS = ("short_factor", "long_factor")
_TEXT_PARTS = ("text_config", "decoder", "llm_config", "language_config", "thinker_config")


def check_sizes(name: str, data: Mapping[str, Any]) -> None:
    """Refuse sizes that are numbers, but not of layers, heads or tokens.

    An entry of another kind (a list for each layer, nothing) is left to who reads it.

    Args:
        name: of the model.
        data: the whole of a config.json.

    Raises:
        KvtoolError: a size that is negative, 0, no whole number or too large; too deep a nesting.
    """
    for part in _parts(name, data):
        for key in _LAYERS:
            _check(name, key, part.get(key), 0, MOST_LAYERS)
    for text in (data, *(data.get(key) for key in _TEXT_PARTS)):
        if isinstance(text, Mapping):
            _check_text(name, text)


def _check_text(name: str, data: Mapping[str, Any]) -> None:
    """Refuse sizes of a text model."""
    unused = {"head_dim"} if data.get("kv_lora_rank") else set()
    unused |= {"sliding_window"} if data.get("use_sliding_window") is False else set()
    for key in _LAYERS:
        _check(name, key, data.get(key), 1, MOST_LAYERS)
    for key in _HEADS:
        _check(name, key, data.get(key), 1, MOST_HEADS)
    for key in _SIZES:
        _check(name, key, data.get(key), 0 if key in unused else 1, _LARGEST)
    for key in _OR_NONE:
        _check(name, key, data.get(key), 0, _LARGEST)
    for rope in (data, *(data.get(key) for key in _ROPES)):
        if isinstance(rope, Mapping):
            _check_rope(name, rope, _rotated(data, rope))


def _check_rope(name: str, rope: Mapping[str, Any], rotated: int | None) -> None:
    """Refuse factors of a rotation that are no numbers, or not one for each pair of channels.

    Args:
        rotated: channels that are rotated; None: unknown.
    """
    for key in _ROPE_NUMBERS:
        value = rope.get(key)
        if value is not None and not (_is_number(value) and value >= 0):
            raise _refuse(name, key, value, "give a number that is not negative")
    for key in _ROPE_LISTS:
        factors = rope.get(key)
        if factors is None:
            continue
        if not isinstance(factors, list) or not all(map(_is_number, factors)):
            raise _refuse(name, key, factors, "give a list of numbers")
        if rotated is not None and len(factors) != rotated // 2:
            raise KvtoolError(
                f"the config.json of model `{name}` gives {len(factors)} numbers in {key}",
                hint=f"give {rotated // 2}, one for each pair of the {rotated} rotated channels",
            )


def _rotated(data: Mapping[str, Any], rope: Mapping[str, Any]) -> int | None:
    """Count the channels that a rotation turns; None where this is not said plainly."""
    width, heads, own = (data.get(k) for k in ("hidden_size", "num_attention_heads", "head_dim"))
    if own is None and type(width) is int and type(heads) is int:
        own = width // heads
    share = rope.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0))
    if type(own) is not int or not _is_number(share) or data.get("kv_lora_rank"):
        return None
    return int(own * share)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _refuse(name: str, key: str, value: Any, hint: str) -> KvtoolError:
    shown = f"the config.json of model `{name}` gives {key} as {quote(value)}"
    return KvtoolError(shown, hint=hint)


def _check(name: str, key: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if not least <= value <= most or value != int(value):
        raise _refuse(name, key, value, f"give a whole number from {least} to {most:,}")


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
