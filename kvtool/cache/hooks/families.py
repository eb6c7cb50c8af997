"""Model families: the ones that can be compressed, and what a user of one should know."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from kvtool.cache.whole.layers import check_layers
from kvtool.errors import KvtoolError
from kvtool.model_shape import FREE, RECURRENT, SLIDING, window_width
from kvtool.transformers_versions import eager_families, kv_sharing_layers, layer_types

_INDEXED = ("index_topk", "index_n_heads", "index_head_dim", "indexer_budget")
_KEY_BIASED = ("bloom", "mpt")
_OWN_WAYS = {
    "blt": "attends to patches of bytes, by caches of their own",
    "diffllama": "attends twice to the keys of every layer",
    "doge": "masks keys by their own values",
    "git": "keeps an attention of its own for its text",
    "jetmoe": "deals its KV heads out to query heads in an order of its own",
    "minimax": "keeps its recurrence in a cache class of its own",
    "moshi": "caches a window that the attention of a prompt does not keep to",
}
"""Families whose attention is not what a cache for all families can serve, and how."""


def check_supported(config: PreTrainedConfig) -> None:
    """Refuse, before anything is loaded or run, what cannot work."""
    text = config.get_text_config(decoder=True)
    why = _why_not(config, text)
    if why is not None:
        raise KvtoolError(f"`{config.model_type}` {why}")
    check_layers(text)


def _why_not(config: PreTrainedConfig, text: Any) -> str | None:
    """Say what a family does that a compressed cache cannot serve; None: it can."""
    kind, kinds = config.model_type, getattr(text, "layer_types", None) or ()
    both_ways = getattr(text, "use_bidirectional_attention", None) in (True, "all")

    def has(*names: str) -> bool:
        return any(getattr(text, name, None) for name in names)

    shifted = "which eviction would shift"
    reasons = (
        (
            getattr(config, "is_encoder_decoder", False),
            "is an encoder-decoder model; only decoders have a cache to compress",
        ),
        (
            kind in _KEY_BIASED or has("alibi"),
            f"adds a bias by the index of a key (ALiBi), {shifted}",
        ),
        (kind in _OWN_WAYS, f"{_OWN_WAYS.get(kind)}, which is not supported"),
        (
            has("cross_attention_layers"),
            "caches the keys of images beside its text (cross-attention)",
        ),
        (has("rel_extent"), f"adds a bias by a key's distance, {shifted}"),
        (
            kind.endswith("_assistant"),
            "reads the cache of another model, and keeps none of its own",
        ),
        (
            has(*_INDEXED) or "indexed_attention" in kinds,
            f"selects keys by their index (sparse attention), {shifted}",
        ),
        (both_ways, "attends in both directions, so it has no cache to compress"),
    )
    for found, reason in reasons:
        if found:
            return reason
    # asked last: an indexed family raises where its layers have unequal heads
    heads = hasattr(text, "num_attention_heads") or hasattr(text, "n_head")
    return None if heads else "has no attention layers, so there is no cache to compress"


def notes(config: PreTrainedConfig) -> list[str]:
    """Say what a user of this model should know before a run, one line each."""
    text = config.get_text_config(decoder=True)
    lines = []
    if text.model_type in eager_families():
        lines.append(
            f"`{text.model_type}` runs its own eager attention, watched by hooks: "
            "a prompt's attention weights exist in full while it runs"
        )
    kinds = [kind for kind, _ in layer_types(text)]
    sliding = [kind for kind in kinds if kind in SLIDING]
    recurrent = [kind for kind in kinds if kind in RECURRENT]
    sharing = kinds.count("dummy") if kv_sharing_layers(text) else 0
    if sliding:
        rest = sum(kind in FREE for kind in kinds)
        effect = f"the budget is that of the other {rest}" if rest else "there is nothing to evict"
        if "chunked_attention" in sliding:
            does = f"attend in chunks of {window_width(text)} tokens"
        else:
            does = f"slide over a window of {window_width(text)} tokens"
        lines.append(f"{len(sliding)} of {len(kinds)} layers {does} and keep just that; {effect}")
    if recurrent:
        lines.append(
            f"{len(recurrent)} of {len(kinds)} layers have a recurrence, whose state stays as it is"
        )
    if sharing:
        lines.append(
            f"{sharing} of {len(kinds)} layers read the keys of an earlier one, as they are kept"
        )
    return lines
