"""Models in train mode: what they would do to a kvtool cache without a word, which is refused."""

from __future__ import annotations

from torch import nn

from kvtool.cache.whole.cache import KVCache
from kvtool.errors import KvtoolError

_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")  # in configurations


def check_training(module: nn.Module, cache: KVCache) -> None:
    """Refuse a decoder in train mode that would drop the cache, or attention weights.

    Raises:
        KvtoolError: gradient checkpointing, which transformers runs without any cache; attention
            dropout.
    """
    if any(getattr(each, "gradient_checkpointing", False) for each in module.modules()):
        raise KvtoolError(
            "gradient checkpointing runs layers without their cache, so a kvtool cache would stay "
            "empty",
            hint="call model.eval(), or model.gradient_checkpointing_disable()",
        )
    if any(getattr(cache.config, name, None) for name in _DROPOUT):
        raise dropout_refused()


def dropout_refused() -> KvtoolError:
    """Return the refusal of attention dropout."""
    return KvtoolError(
        "the model is in train mode with attention dropout, which a kvtool cache has no part in",
        hint="call model.eval()",
    )
