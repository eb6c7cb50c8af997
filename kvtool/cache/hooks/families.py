"""Which models can be compressed, and what a user of one should know."""

from __future__ import annotations

from transformers import PreTrainedConfig

from kvtool.cache.layers import check_layers
from kvtool.errors import KvtoolError
from kvtool.transformers_versions import layer_types

EAGER_FAMILIES = ("falcon", "gptj")  # whose attention cannot be exchanged, only watched
_INDEXED = ("index_topk", "index_n_heads", "index_head_dim")
_KEY_BIASED = ("bloom", "mpt")


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
    if any(getattr(text, name, None) for name in _INDEXED):
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
    if text.model_type in EAGER_FAMILIES:
        lines.append(
            f"`{text.model_type}` runs its own eager attention, watched by hooks: "
            "a prompt's attention weights exist in full while it runs"
        )
    options = [option for _, option in layer_types(text)]
    windows = [option["sliding_window"] for option in options if "sliding_window" in option]
    if windows:
        rest = len(options) - len(windows)
        effect = f"the budget is that of the other {rest}" if rest else "there is nothing to evict"
        lines.append(
            f"{len(windows)} of {len(options)} layers slide over a window of {windows[0]} tokens "
            f"and keep just that; {effect}"
        )
    return lines
