"""The shape of a model, which says what it stores of a token; no weights.

The only file that knows under which names configurations give heads, KV heads, head sizes, latents
and windows, and which families store something else than those names say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtool.transformers_versions import layer_types

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Size of a number in the dtypes that a model can be loaded in."""

FREE = ("full_attention", "hybrid")
"""Kinds of layers whose budget is free, by transformers' names."""

SLIDING = ("sliding_attention", "hybrid_sliding", "chunked_attention")
"""Kinds of layers that keep their own window or chunk, whatever the budget."""

RECURRENT = ("linear_attention", "conv", "mamba", "recurrent", "hybrid", "hybrid_sliding")
"""Kinds of layers that carry the state of a recurrence, beside slots or in place of them."""

_KEY_BIASES = ("attention_bias", "qkv_bias", "use_qkv_bias", "use_bias", "enable_bias", "bias")
"""Entries that say whether keys have a bias; those in front are of attention alone."""

_ALWAYS_BIASED = (
    *("qwen2", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "glm4v_text", "phi"),
    *("gpt2", "gpt_bigcode", "bloom", "persimmon", "biogpt", "xglm"),
)
"""Families whose keys have biases, whatever their entries say."""


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer stores.

    Attributes:
        kv_heads, heads: that store keys, and that ask.
        key_dim, value_dim: numbers of a key and of a value in one head. Latent attention (MLA)
            stores what all heads share in one KV head: the latent as key, the rotated key as value.
        itemsize: bytes of a number.
        window: tokens that the layer keeps at most of itself, None where its budget is free.
    """

    kv_heads: int
    heads: int
    key_dim: int
    value_dim: int
    itemsize: int
    window: int | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of the key and value of one token in one KV head, in the model's dtype."""
        return (self.key_dim + self.value_dim) * self.itemsize

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values of one token, in the model's dtype."""
        return self.kv_heads * self.token_bytes


def layer_shapes(config: Any, dtype: str | None = None) -> list[LayerShape | None]:
    """Read what each layer stores, None for those without keys and values of their own.

    Args:
        config: a transformers configuration.
        dtype: in which keys and values are stored; None or `auto`: the checkpoint's own.
    """
    text = config.get_text_config(decoder=True)
    size = _itemsize(stored_dtype(config, dtype))
    known: dict[tuple[str, int | None], LayerShape] = {}  # entries of a config read slowly
    shapes: list[LayerShape | None] = []
    for (kind, options), own in zip(layer_types(text), text.per_layer_config, strict=True):
        width = options.get("sliding_window")
        if kind not in FREE + SLIDING:
            shapes.append(None)
        elif own is not text:
            shapes.append(_layer_shape(own, kind, width, size))
        else:
            key = kind, width
            known[key] = known.get(key) or _layer_shape(own, kind, width, size)
            shapes.append(known[key])
    return shapes


def _itemsize(dtype: str) -> int:
    """Return the bytes of a number, asking torch for uncommon dtypes alone."""
    if dtype in DTYPE_BYTES:
        return DTYPE_BYTES[dtype]
    import torch

    return int(getattr(torch, dtype).itemsize)


def _layer_shape(config: Any, kind: str, width: int | None, itemsize: int) -> LayerShape:
    heads = _fact(config, "num_attention_heads", kind)
    sizes = (_kv_heads(config, kind, heads), heads, *_dims(config, kind, heads), itemsize)
    return LayerShape(*sizes, None if width is None else kept_of_window(width))


def layer_kinds(config: Any) -> list[str]:
    """Name the kind of each layer, as transformers does."""
    return [kind for kind, _ in layer_types(config.get_text_config(decoder=True))]


def window_width(config: Any) -> int | None:
    """Read the width of the first layer that slides over a window, None where none does."""
    options = [option for _, option in layer_types(config.get_text_config(decoder=True))]
    return next((own["sliding_window"] for own in options if "sliding_window" in own), None)


def kept_of_window(width: int) -> int:
    """Count the tokens that a layer keeps of its window, which the running token is part of."""
    return max(1, width - 1)


def stored_dtype(config: Any, dtype: str | None) -> str:
    """Name the dtype that keys and values have: `float32` where nothing says.

    Transformers loads all of a model in the dtype of the whole configuration; its parts may name
    none. Checkpoints in mxfp4 name none, and have the rest of their weights in bfloat16.

    Args:
        dtype: the one asked for; None or `auto`: the checkpoint's own.
    """
    if dtype is not None and dtype != "auto":
        return dtype
    parts = (config, config.get_text_config(decoder=True))
    unsaid = "bfloat16" if quantised_by(config) == "mxfp4" else "float32"
    found = next(filter(None, (getattr(part, "dtype", None) for part in parts)), unsaid)
    return str(found).removeprefix("torch.")


def quantised_by(config: Any) -> str | None:
    """Name the method that a checkpoint's weights are quantised by, None where they are not."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    entries = settings if isinstance(settings, dict) else getattr(settings, "to_dict", dict)()
    method = entries.get("quant_method") or "bitsandbytes"  # which early files do not name
    return str(getattr(method, "value", method))


def trained_length(config: Any) -> int | None:
    """Count the positions that a model was trained for, None if it does not say."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def stores_latents(config: Any) -> bool:
    """Say whether a layer stores what all its heads share, in place of keys and values (MLA)."""
    return bool(getattr(config.get_text_config(decoder=True), "kv_lora_rank", None))


def has_key_biases(config: Any) -> bool:
    """Say whether a bias is added to keys, by a `PlainConfig` or a transformers configuration."""
    text = config.get_text_config(decoder=True)
    entries = text.to_dict()
    found = next((entries[name] for name in _KEY_BIASES if entries.get(name) is not None), False)
    return bool(found) or text.model_type in _ALWAYS_BIASED


def _fact(config: Any, name: str, kind: str) -> Any:
    """Return an entry of a configuration, None without it."""
    own = getattr(config, f"swa_{name}", None) if kind in SLIDING else None
    return own or getattr(config, name, None)


def _kv_heads(config: Any, kind: str, heads: int) -> int:
    """Count the heads that store keys, of `heads` that ask."""
    if getattr(config, "kv_lora_rank", None):
        return 1
    if getattr(config, "new_decoder_architecture", False):
        return heads  # Falcon repeats its KV heads before they reach the cache
    multi_query = getattr(config, "multi_query", None)
    if multi_query is not None:
        return 1 if multi_query else heads
    names = ("num_key_value_heads", "num_kv_heads")
    found = next(filter(None, (_fact(config, name, kind) for name in names)), heads)
    doubled = config.model_type == "mimo_v2_flash" and kind in SLIDING
    return 2 * found if doubled else found


def _dims(config: Any, kind: str, heads: int) -> tuple[int, int]:
    """Return the numbers of a key and of a value in one head."""
    if getattr(config, "kv_lora_rank", None):
        return config.kv_lora_rank, config.qk_rope_head_dim
    key = _fact(config, "head_dim", kind) or config.hidden_size // heads
    return key, getattr(config, "v_head_dim", None) or key
