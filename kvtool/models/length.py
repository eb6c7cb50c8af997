"""How long a text a model was trained for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def trained_length(config: PreTrainedConfig) -> int | None:
    """Return how many positions a model was trained for, None if it does not say."""
    text = config.get_text_config(decoder=True)
    return getattr(text, "max_position_embeddings", None)
