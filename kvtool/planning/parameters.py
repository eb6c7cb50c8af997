"""Count a model's parameters from its configuration, without torch and without its weights.

The only file that knows how the layers of a family are built: which of its matrices have a bias,
how many norms a layer has, and whether experts take the place of an MLP. bitsandbytes stores plain
linear layers in fewer bits and leaves the rest as it is: embeddings, the output head, norms,
biases, and experts, which transformers keep in one tensor a layer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvtool.model_shape import DTYPE_BYTES, stored_dtype

Bits = Literal["8bit", "4bit"]
"""In how many bits bitsandbytes stores weights."""

BITS: tuple[Bits, ...] = ("8bit", "4bit")

_BLOCK = 64  # weights of 4 bits that share a scale (NF4, without double quantisation)
_SCALE = 4  # bytes of a scale, and of the statistic of a row in 8 bits
_MOST_HEADER = 100 * 2**20  # bytes of a header of safetensors, as its own reader allows
_CODES = 16 * 4  # bytes of the 16 numbers that codes of 4 bits stand for


@dataclass(frozen=True)
class Matrix:
    """The weight of a linear layer, of which the model has `count`."""

    outputs: int
    inputs: int
    count: int = 1

    @property
    def numbers(self) -> int:
        """Weights of all of them."""
        return self.count * self.outputs * self.inputs

    def times(self, layers: int) -> Matrix:
        """Return the matrices of several layers."""
        return replace(self, count=self.count * layers)

    def bytes(self, bits: Bits) -> int:
        """Count the bytes of all of them as bitsandbytes stores them.

        8 bits take a byte a weight and a float32 for each row; 4 bits take half a byte a weight, a
        float32 for each block of 64, and the table of codes.
        """
        size = self.outputs * self.inputs
        if bits == "8bit":
            return self.count * (size + _SCALE * self.outputs)
        return self.count * (-(-size // 2) + _SCALE * -(-size // _BLOCK) + _CODES)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model.

    Attributes:
        linear: what bitsandbytes stores in fewer bits.
        others: numbers that keep the model's dtype.
    """

    linear: tuple[Matrix, ...]
    others: int

    @property
    def count(self) -> int:
        """All parameters; those that are tied count once."""
        return self.others + sum(each.numbers for each in self.linear)

    def bytes(self, itemsize: int, bits: Bits | None = None) -> int:
        """Count the bytes of the weights.

        Args:
            itemsize: bytes of a number in the model's dtype.
            bits: of linear layers; None: those of the dtype.
        """
        if bits is None:
            return self.count * itemsize
        return self.others * itemsize + sum(each.bytes(bits) for each in self.linear)


@dataclass(frozen=True)
class _Family:
    """How the layers of a family are built. A text names the entry that says it.

    Attributes:
        query_bias, output_bias, mlp_bias: whether these matrices have a bias.
        gated: whether the MLP has three matrices, and not two.
        norms: of hidden states, in a layer.
        norm_bias: whether norms have a bias.
        pairs_norm: of queries and keys: of a `head`, of `all` heads, or none.
        head_bias: whether the output head has a bias.
        experts: whether layers may have experts in place of an MLP.
        refused: an entry that must not be set.
    """

    query_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    gated: bool = True
    norms: int = 2
    norm_bias: bool = False
    pairs_norm: Literal["", "head", "all"] = ""
    head_bias: bool = False
    experts: bool = False
    refused: str = ""


_ATTENTION: dict[str, Any] = {"query_bias": "attention_bias", "output_bias": "attention_bias"}
_PLAIN: dict[str, Any] = {"mlp_bias": True, "gated": False, "norm_bias": True}
_LLAMA = _Family(**_ATTENTION, mlp_bias="mlp_bias")
_GEMMA = {**_ATTENTION, "norms": 4}
_FAMILIES = {
    "gemma": _Family(**_ATTENTION),
    "gemma2": _Family(**_GEMMA),
    "gemma3_text": _Family(**_GEMMA, pairs_norm="head"),
    "gpt_neox": _Family(**_ATTENTION, **_PLAIN),
    "granite": _LLAMA,
    "llama": _LLAMA,
    "mistral": _Family(),
    "mixtral": _Family(experts=True),
    "olmo2": _Family(**_ATTENTION, pairs_norm="all"),
    "phi": _Family(
        query_bias=True, output_bias=True, **_PLAIN, norms=1, head_bias=True, refused="qk_layernorm"
    ),
    "phi3": _Family(),
    "qwen2": _Family(query_bias=True),
    "qwen2_moe": _Family(query_bias="qkv_bias", experts=True),
    "qwen3": _Family(**_ATTENTION, pairs_norm="head"),
    "qwen3_moe": _Family(**_ATTENTION, pairs_norm="head", experts=True),
    "smollm3": _LLAMA,
    "starcoder2": _Family(
        query_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        gated=False,
        norm_bias=True,
    ),
}
"""Families whose parameters are counted here; the tests count them on the models themselves."""


def count_parameters(config: Any) -> Parameters | None:
    """Count the parameters of a model; None for a family that is not known here.

    Args:
        config: a `PlainConfig` or a transformers configuration.
    """
    if config.get_text_config(decoder=True) is not config:
        return None  # an image or audio tower comes with it
    family, entries = _FAMILIES.get(config.model_type), config.to_dict()
    if family is None or entries.get(family.refused):
        return None
    hidden, layers = entries["hidden_size"], entries["num_hidden_layers"]
    sparse = _sparse_layers(entries, layers) if family.experts else 0
    linear, others = _attention(family, entries, hidden)
    norm = hidden * (2 if family.norm_bias else 1)
    others = layers * (others + family.norms * norm) + norm
    matrices = [each.times(layers) for each in linear]
    if layers > sparse:
        inner = entries["intermediate_size"]
        bias = _says(entries, family.mlp_bias)
        of_mlp = [Matrix(inner, hidden, 1 + family.gated), Matrix(hidden, inner)]
        matrices += [each.times(layers - sparse) for each in of_mlp]
        others += (layers - sparse) * (sum(m.outputs * m.count for m in of_mlp) if bias else 0)
    if sparse:
        shared, rest = _experts(entries, hidden)
        matrices += [each.times(sparse) for each in shared]
        others += sparse * rest
    head = 0 if entries.get("tie_word_embeddings") else entries["vocab_size"] * hidden
    others += entries["vocab_size"] * hidden + head
    others += entries["vocab_size"] if family.head_bias else 0
    return Parameters(tuple(matrices), others)


def weights_bytes(config: Any, dtype: str | None, bits: Bits | None = None) -> int | None:
    """Count the bytes of a model's weights from its configuration; None: a family not known here.

    A checkpoint that is quantised already is not known here either: its files say what it takes.
    Buffers, a few KiB, are not counted.

    Args:
        config: a `PlainConfig` or a transformers configuration.
        dtype: in which the model runs; None or `auto`: the checkpoint's own.
        bits: in which bitsandbytes stores the linear layers; None: the dtype.
    """
    itemsize = DTYPE_BYTES.get(stored_dtype(config, dtype))
    found = None if is_quantised(config) else count_parameters(config)
    return None if found is None or itemsize is None else found.bytes(itemsize, bits)


def is_quantised(config: Any) -> bool:
    """Say whether a checkpoint's weights are in fewer bits already."""
    return getattr(config, "quantization_config", None) is not None


def folder_bytes(folder: Path) -> int | None:
    """Count the bytes of the tensors in a folder's safetensors files, None without such files.

    Of checkpoints that are quantised this is what their weights take. Only headers are read.
    """
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            shards = set(json.loads(index.read_bytes())["weight_map"].values())
        else:
            shards = {"model.safetensors"}
        return sum(_tensor_bytes(folder / str(shard)) for shard in shards)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _tensor_bytes(file: Path) -> int:
    """Return the bytes of a safetensors file behind its header."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
    if header > min(size - 8, _MOST_HEADER):
        raise ValueError(f"`{file}` is no file of safetensors")
    return size - 8 - header


def _says(entries: Mapping[str, Any], bias: bool | str) -> bool:
    return bool(entries.get(bias)) if isinstance(bias, str) else bias


def _attention(
    family: _Family, entries: Mapping[str, Any], hidden: int
) -> tuple[list[Matrix], int]:
    """Return the matrices of a layer's attention, and its other numbers."""
    heads = entries["num_attention_heads"]
    stored = entries.get("num_key_value_heads") or heads
    dim = entries.get("head_dim") or hidden // heads
    matrices = [Matrix(heads * dim, hidden), Matrix(stored * dim, hidden, 2)]
    others = 0
    if _says(entries, family.query_bias):
        others += (heads + 2 * stored) * dim
    if _says(entries, family.output_bias):
        others += hidden
    others += {"": 0, "head": 2 * dim, "all": (heads + stored) * dim}[family.pairs_norm]
    return [*matrices, Matrix(hidden, heads * dim)], others


def _sparse_layers(entries: Mapping[str, Any], layers: int) -> int:
    """Count the layers that have experts."""
    every, dense = entries.get("decoder_sparse_step") or 1, entries.get("mlp_only_layers") or ()
    if not _expert_count(entries):
        return 0
    return sum((i + 1) % every == 0 and i not in dense for i in range(layers))


def _expert_count(entries: Mapping[str, Any]) -> int:
    return entries.get("num_local_experts") or entries.get("num_experts") or 0


def _experts(entries: Mapping[str, Any], hidden: int) -> tuple[list[Matrix], int]:
    """Return the matrices of a layer's shared expert, and the numbers of the others and router."""
    inner = entries.get("moe_intermediate_size") or entries["intermediate_size"]
    count = _expert_count(entries)
    shared = entries.get("shared_expert_intermediate_size") or 0
    matrices = [Matrix(shared, hidden, 2), Matrix(hidden, shared), Matrix(1, hidden)]
    return matrices if shared else [], count * (3 * inner * hidden + hidden)
