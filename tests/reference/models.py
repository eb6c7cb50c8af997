"""Small random models whose attention is peaky, with a first token that attracts every query."""

import functools

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SINK = 1  # the token that attracts
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": SINK,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ALL, FIRST = 0, 1  # channels of the hidden state: "a token", "the first token"
SLOW = 7  # a dimension of each head that RoPE hardly turns
PULL = {"llama": (0.7, 4.0, 5.0), "qwen3": (0.6, 5.0, 6.0)}  # to the first token, by layer


@functools.cache
def peaky(family, layers=3):
    """A Llama or Qwen3 of 8 query and 2 KV heads, the same at every call."""
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **{**SIZES, "num_hidden_layers": layers})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    source = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for _name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.copy_(torch.randn(weight.shape, generator=source) * 0.2)
        embed = model.get_input_embeddings().weight
        embed[:, ALL], embed[:, FIRST] = 3.0, 0.0
        embed[SINK, FIRST] = 6.0
        for layer, pull in zip(model.model.layers, PULL[family], strict=False):
            for writer in (layer.self_attn.o_proj, layer.mlp.down_proj):
                writer.weight[[ALL, FIRST]] = 0.0
            queries = layer.self_attn.q_proj.weight.view(8, 16, 64)
            keys = layer.self_attn.k_proj.weight.view(2, 16, 64)
            queries.mul_(1.3)
            keys.mul_(1.3)
            queries[:, SLOW], keys[:, SLOW] = 0.0, 0.0
            queries[:, SLOW, ALL] = pull
            keys[:, SLOW, FIRST] = pull
            if family == "qwen3":  # norms would undo the scale of the projections
                layer.self_attn.q_norm.weight.mul_(2.0)
                layer.self_attn.k_norm.weight.mul_(2.0)
    return model


def prompt(length, seed=0):
    """The attracting token, then random ones."""
    source = torch.Generator().manual_seed(seed)
    rest = torch.randint(2, SIZES["vocab_size"], (length - 1,), generator=source).tolist()
    return [SINK, *rest]
