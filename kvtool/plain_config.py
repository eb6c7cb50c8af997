"""Read the configuration of a common family from its config.json, without transformers.

The only file that knows what transformers makes of the entries of these families. A config.json may
hold any other entry, lack one that has a default worth knowing, or have a value of an unexpected
kind. It is then left to transformers, which says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_FLOATS = ("initializer_range", "rms_norm_eps", "attention_dropout")
_FLAGS = ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window")
_KINDS = dict.fromkeys(_FLOATS, float) | dict.fromkeys(_FLAGS, bool) | {"hidden_act": str}
_NOT_COMPUTED = ("architectures", "transformers_version", "use_cache", "dtype", "torch_dtype")
_ROPE = ("rope_parameters", "rope_theta", "rope_scaling")
_ROPES = {
    "default": ("rope_theta",),
    "llama3": (
        *("rope_theta", "original_max_position_embeddings", "factor"),
        *("low_freq_factor", "high_freq_factor"),
    ),
}
_DTYPES = ("float32", "bfloat16", "float16")
_COMMON = (
    *_SIZES,
    *_TOKENS,
    *("hidden_act", "initializer_range", "rms_norm_eps", "attention_dropout"),
    "tie_word_embeddings",
)
_QWEN = (*_COMMON, "use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
_FIELDS = {
    "llama": (*_COMMON, "head_dim", "attention_bias", "mlp_bias", "pretraining_tp"),
    "mistral": (*_COMMON, "head_dim", "sliding_window"),
    "qwen2": _QWEN,
    "qwen3": (*_QWEN, "head_dim", "attention_bias"),
}
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "llama": {"pad_token_id": None, "head_dim": None, "mlp_bias": False, "pretraining_tp": 1},
    "mistral": {"pad_token_id": None, "head_dim": None},
    "qwen2": {"pad_token_id": None, "layer_types": None},
    "qwen3": {"pad_token_id": None, "layer_types": None},
}
"""Entries that files of a family often leave out, and what they are then."""
_GENERAL = {
    "chunk_size_feed_forward": 0,
    "id2label": {0: "LABEL_0", 1: "LABEL_1"},
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "problem_type": None,
}
"""What transformers adds to every configuration."""


@dataclass(frozen=True)
class PlainConfig:
    """A configuration whose entries are attributes, named as in transformers.

    Attributes:
        dtype: of the checkpoint; None where it does not say.
        head_dim: numbers of a key in one head.
        entries: what `to_dict` returns, but for what computes nothing.
    """

    dtype: str | None
    head_dim: int
    entries: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        entries = vars(self).get("entries", {})
        if name not in entries:
            raise AttributeError(name)
        return entries[name]

    @property
    def per_layer_config(self) -> list[PlainConfig]:
        """The configuration of each layer, which is that of all."""
        return [self] * self.num_hidden_layers

    def cache_layers(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the kind of every cache layer and the arguments that make it."""
        width = self.entries.get("sliding_window")
        layer: tuple[str, dict[str, Any]] = ("full_attention", {})
        if width is not None:
            layer = ("sliding_attention", {"sliding_window": width})
        return [layer] * self.num_hidden_layers

    def get_text_config(self, decoder: bool | None = None) -> PlainConfig:
        """Return the configuration of the text model, which is the whole."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return all entries that say what the model computes."""
        return self.entries


def plain_config(data: Mapping[str, Any]) -> PlainConfig | None:
    """Read a config.json of a common family, None where transformers has to read it."""
    family = data.get("model_type")
    if not isinstance(family, str) or family not in _FIELDS:
        return None
    fields = _FIELDS[family]
    if set(data) - {*fields, *_NOT_COMPUTED, *_ROPE, "model_type"}:
        return None
    given = {name: value for name, value in data.items() if name in fields}
    entries = _LEFT_OUT[family] | given
    rope = _rope(data)
    if set(fields) - set(entries) or rope is None or not _plain_values(entries):
        return None
    dtype = data.get("torch_dtype") if data.get("dtype") is None else data["dtype"]
    if dtype is not None and dtype not in _DTYPES:
        return None
    if not isinstance(data.get("use_cache", True), bool):
        return None
    width, heads = entries["hidden_size"], entries["num_attention_heads"]
    if width % heads or heads % entries["num_key_value_heads"]:
        return None
    if "use_sliding_window" in entries:
        full = ["full_attention"] * entries["num_hidden_layers"]
        if entries["use_sliding_window"] or entries["layer_types"] not in (None, full):
            return None
        entries = entries | {"sliding_window": None, "layer_types": full}
    head_dim = entries.get("head_dim") or width // heads
    if "head_dim" in fields:
        entries = entries | {"head_dim": head_dim}
    entries = entries | _GENERAL | {"model_type": family, "rope_parameters": rope}
    return PlainConfig(dtype, head_dim, entries)


def _plain_values(entries: Mapping[str, Any]) -> bool:
    """Return whether every entry is of the kind that it usually is."""
    if any(type(entries[name]) is not int or entries[name] < 1 for name in _SIZES):
        return False
    vocabulary = entries["vocab_size"]
    for name, value in entries.items():
        if name in _TOKENS:
            tokens = value if type(value) is list else [] if value is None else [value]
            if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
                return False
        elif name in ("head_dim", "sliding_window", "pretraining_tp", "max_window_layers"):
            optional = name in ("sliding_window", "head_dim") and value is None
            if not optional and (type(value) is not int or value < 1):
                return False
        elif name in _KINDS and type(value) is not _KINDS[name]:
            return False
    return 0 <= entries["initializer_range"] <= 1


def _rope(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return rotations as transformers spells them: unscaled or Llama 3's, None for all others."""
    rope = data.get("rope_parameters")
    if rope is None:
        scaling = data.get("rope_scaling") or {"rope_type": "default"}
        if not isinstance(scaling, dict) or "rope_theta" in scaling:
            return None
        rope = scaling | {"rope_theta": data.get("rope_theta")}
    elif not isinstance(rope, dict) or "rope_theta" in data or data.get("rope_scaling"):
        return None
    kind = rope.get("rope_type")
    if not isinstance(kind, str) or set(rope) != {"rope_type", *_ROPES.get(kind, ())}:
        return None
    numbers = [rope[name] for name in _ROPES[kind]]
    if not all(type(number) in (int, float) and number > 0 for number in numbers):
        return None
    if kind == "llama3" and not _is_llama3(rope):
        return None
    return rope


def _is_llama3(rope: Mapping[str, Any]) -> bool:
    """Return whether transformers takes these numbers without a word."""
    return (
        all(type(rope[name]) is float for name in _ROPES["llama3"][2:])
        and type(rope["original_max_position_embeddings"]) is int
        and rope["factor"] >= 1
        and rope["low_freq_factor"] < rope["high_freq_factor"]
    )
