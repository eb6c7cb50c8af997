"""What a model stores per token, read from its configuration; no weights."""

from __future__ import annotations

from typing import Any

from kvtool.documents.profile import ModelShape
from kvtool.identity import config_hash
from kvtool.transformers_versions import layer_types

ATTENDS = ("full_attention", "sliding_attention", "hybrid", "hybrid_sliding")
"""Kinds of layers that store keys and values, by transformers' names."""


def model_shape(
    config: Any, *, name: str, revision: str | None = None, dtype: str | None = None
) -> ModelShape:
    """Describe a model.

    Args:
        config: a transformers configuration.
        name: what the model is called.
        dtype: in which keys and values are stored; None or `auto`: the checkpoint's own.
    """
    text = config.get_text_config(decoder=True)
    kinds, windows = layer_kinds(text)
    dtype = stored_dtype(text, dtype)
    widths = [window for window in windows if window is not None]
    return ModelShape(
        id=name,
        revision=revision,
        config_hash=config_hash(config),
        dtype=dtype,
        layers=len(kinds),
        heads=text.num_attention_heads,
        kv_heads=_kv_heads(text),
        head_dim=_head_dim(text),
        layer_types=kinds,
        sliding_window=widths[0] if widths else None,
        kv_bytes_per_token=sum(layer_bytes(text, dtype)),
        vocabulary=text.vocab_size,
        trained_length=getattr(text, "max_position_embeddings", None),
    )


def layer_kinds(config: Any) -> tuple[list[str], list[int | None]]:
    """Return the kind of every layer and the width of its sliding window, None without one."""
    kinds = layer_types(config)
    return [kind for kind, _ in kinds], [option.get("sliding_window") for _, option in kinds]


def stored_dtype(config: Any, dtype: str | None) -> str:
    """Return the name of the dtype that keys and values have: `float32` where nothing says."""
    if dtype not in (None, "auto"):
        return dtype
    return str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")


def layer_bytes(config: Any, dtype: str) -> list[int]:
    """Return the bytes of one token's keys and values in every layer, 0 where there are none.

    Latent attention (MLA) stores what all heads share: a latent vector and the rotated key.
    """
    import torch

    kinds, _ = layer_kinds(config)
    size = getattr(torch, dtype).itemsize
    found = []
    for kind, own in zip(kinds, config.per_layer_config, strict=True):
        if kind not in ATTENDS:
            found.append(0)
        elif _latent(own):
            found.append((own.kv_lora_rank + own.qk_rope_head_dim) * size)
        else:
            found.append(2 * _kv_heads(own) * _head_dim(own) * size)
    return found


def _latent(config: Any) -> bool:
    return bool(getattr(config, "kv_lora_rank", None))


def _kv_heads(config: Any) -> int:
    """Return the heads that store keys: one in latent attention."""
    if _latent(config) or (
        getattr(config, "multi_query", False)
        and not getattr(config, "new_decoder_architecture", False)
    ):
        return 1
    names = ("num_key_value_heads", "num_kv_heads")
    given = (getattr(config, name, None) for name in names)
    return next(filter(None, given), config.num_attention_heads)


def _head_dim(config: Any) -> int:
    """Return the size of what a head stores as its key."""
    if _latent(config):
        return config.kv_lora_rank + config.qk_rope_head_dim
    given = getattr(config, "head_dim", None)
    return given or config.hidden_size // config.num_attention_heads
