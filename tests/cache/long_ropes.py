"""Tiny models whose RoPE depends on the length of the text, and what plain transformers gives."""

import copy
import functools

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models_for_tests import SIZES, random_ids

TRAINED = 64  # tokens; longer texts are turned by other factors
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0, 3.0, 5.0, 8.0, 2.0, 6.0, 3.0, 9.0],
    "original_max_position_embeddings": TRAINED,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
TYPED = {"head_dim": 16, "sliding_window": 24}
TYPED["layer_types"] = ["sliding_attention", "full_attention"]
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 48,
}
MODELS = {
    "phi3 longrope": (
        "phi3",
        {"original_max_position_embeddings": TRAINED, "max_position_embeddings": 256},
        LONG | {"partial_rotary_factor": 1.0},
    ),
    "phimoe longrope": (
        "phimoe",
        {
            "original_max_position_embeddings": TRAINED,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
        LONG | {"short_mscale": 1.0, "long_mscale": 1.7},
    ),
    "llama longrope": ("llama", {"head_dim": 16}, LONG),
    "llama dynamic": ("llama", {"max_position_embeddings": TRAINED}, DYNAMIC),
    "gemma3 dynamic": (
        "gemma3_text",
        TYPED | {"max_position_embeddings": TRAINED},
        {"full_attention": DYNAMIC, "sliding_attention": PLAIN},
    ),
    "gemma3 longrope": ("gemma3_text", TYPED, {"full_attention": LONG, "sliding_attention": PLAIN}),
    "falcon dynamic": (
        "falcon",
        {"max_position_embeddings": TRAINED, "alibi": False, "new_decoder_architecture": False},
        DYNAMIC,
    ),
    "deepseek dynamic": ("deepseek_v2", LATENT | {"max_position_embeddings": TRAINED}, DYNAMIC),
}


def long_rope_model(name):
    """A model of its own, fresh: nothing has been read with it."""
    return copy.deepcopy(_model(name))


@functools.cache
def _model(name):
    kind, changes, rope = MODELS[name]
    sizes = SIZES | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(kind, **(sizes | {"rope_parameters": rope} | changes))
    config.eos_token_id = None
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight.dim() >= 2:
                scale = 0.5 if "embed" in weight_name else 0.2
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def plain_logits(name, ids, length, model=None):
    """One plain forward of transformers over (1, n) ids, with the factors of a longer text.

    Transformers chooses the factors by the last position of a batch. So a second text is in the
    batch whose positions end where the longer text does.

    Args:
        model: that has read nothing with other factors; None: a fresh one.
    """
    model = long_rope_model(name) if model is None else model
    n = ids.shape[1]
    places = torch.stack([torch.arange(n), torch.arange(length - n, length)])
    return model(ids.repeat(2, 1), position_ids=places).logits[:1]


def plain_answer(name, ids, new):
    """The likeliest tokens after (1, n) ids, each from one plain forward over the whole text."""
    length, model = ids.shape[1] + new, long_rope_model(name)
    for _ in range(new):
        logits = plain_logits(name, ids, length, model)
        ids = torch.cat([ids, logits[:, -1].argmax(-1)[:, None]], 1)
    return ids


def text(tokens, seed=3):
    return random_ids(tokens, seed=seed)
