"""Random Llamas to measure with: times do not depend on the values of weights."""

from __future__ import annotations

import copy

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import kvtool

# vocabulary, hidden size, size between, layers, query heads, KV heads, head dimension
SHAPES = {
    "tiny": (256, 64, 96, 2, 4, 2, 16),
    "42m": (8192, 512, 1408, 12, 8, 2, 64),
    "8b": (128256, 4096, 14336, 32, 32, 8, 128),
}


def build_models(
    shape: str = "42m", device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same random weights with kvtool's attention, and with transformers' sdpa.

    The weights are made where they stay, in their dtype, and are there once.
    """
    vocabulary, hidden, between, layers, heads, kv_heads, head_dim = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=between,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=131072,
    )
    torch.manual_seed(0)
    with torch.device(device):
        plain = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    plain.eval()
    ours = with_weights_of(plain)
    kvtool.attach(ours)
    return ours, plain


def with_weights_of(model: PreTrainedModel) -> PreTrainedModel:
    """A model of its own over the same parameters."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
