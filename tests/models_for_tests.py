"""Small random models with a planted attention sink: attention is peaky, policies differ."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SINK = 1  # the token whose embedding draws attention


def peaky_model(family: str, kernel: str = "sdpa", **changes) -> PreTrainedModel:
    """A random model with large queries and keys, whose token `SINK` is attended by many."""
    config = AutoConfig.for_model(family, **(SMALL | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                continue
            scale = 0.5 if "embed" in name else 0.2
            if "q_proj" in name or "k_proj" in name:
                scale = 0.45
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
        # a common direction in all embeddings, strongest in the sink, gives every query a pull
        # towards it
        embedding = model.get_input_embeddings().weight
        direction = torch.randn(embedding.shape[1], generator=generator)
        embedding += 0.35 * direction
        embedding[SINK] += 1.5 * direction
    return model


def random_ids(length: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    """Token ids that begin with the sink token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, SMALL["vocab_size"], (batch, length), generator=generator)
    ids[:, 0] = SINK
    return ids
