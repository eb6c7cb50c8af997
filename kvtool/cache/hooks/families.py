"""Model families: the ones that can be compressed, and what a user of one should know."""

from __future__ import annotations

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
    """Refuse, before anything is loaded or run, what cannot work.

    Raises:
        KvtoolError: one line that says why.
    """
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise KvtoolError(
            f"`{kind}` is an encoder-decoder model; only decoders have a cache to compress"
        )
    text = config.get_text_config(decoder=True)
    if kind in _KEY_BIASED or getattr(text, "alibi", False):
        raise KvtoolError(
            f"`{kind}` adds a bias by the index of a key (ALiBi), which eviction would shift"
        )
    if kind in _OWN_WAYS:
        raise KvtoolError(f"`{kind}` {_OWN_WAYS[kind]}, which is not supported")
    if getattr(text, "cross_attention_layers", None):
        raise KvtoolError(f"`{kind}` caches the keys of images beside its text (cross-attention)")
    if getattr(text, "rel_extent", None):
        raise KvtoolError(f"`{kind}` adds a bias by a key's distance, which eviction would shift")
    if kind.endswith("_assistant"):
        raise KvtoolError(f"`{kind}` reads the cache of another model, and keeps none of its own")
    if any(getattr(text, name, None) for name in _INDEXED) or "indexed_attention" in (
        getattr(text, "layer_types", None) or ()
    ):
        raise KvtoolError(
            f"`{kind}` selects keys by their index (sparse attention), which eviction would shift"
        )
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise KvtoolError(f"`{kind}` attends in both directions, so it has no cache to compress")
    if not hasattr(text, "num_attention_heads") and not hasattr(text, "n_head"):
        raise KvtoolError(f"`{kind}` has no attention layers, so there is no cache to compress")
    check_layers(text)


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
