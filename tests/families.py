"""A tiny random model of each supported family."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
HYBRID = ["sliding_attention", "full_attention"] * 2
DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SHARED_EXPERT = {"shared_expert_intermediate_size": 48, "full_attention_interval": 2}
GEMMA = {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}

FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 24, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", GEMMA | {"layer_types": HYBRID}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "falcon": (
        "falcon",
        {"multi_query": True, "new_decoder_architecture": False, "alibi": False},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gptj": (
        "gptj",
        {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 2048, "rotary_dim": 16},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"head_dim": 16}),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "head_dim": 16,
            "sliding_window": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "qwen3_next": ("qwen3_next", LINEAR | EXPERTS | SHARED_EXPERT | {"head_dim": 16}),
    "falcon_h1": (
        "falcon_h1",
        MAMBA | {"head_dim": 16, "mamba_d_ssm": 64, "mamba_expand": 1, "mamba_chunk_size": 8},
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
}
RECURRENT = ("qwen3_next", "falcon_h1", "lfm2")
HOOKED = ("falcon", "gptj")


def family_model(name: str) -> PreTrainedModel:
    """A random model with weights large enough that attention is not uniform; eager attention."""
    kind, changes = FAMILIES[name]
    settings = {} if kind == "gptj" else BASE
    config = AutoConfig.for_model(kind, **(settings | {"vocab_size": 96} | changes))
    config.eos_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the decay of a recurrence is drawn at construction, and stays
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight.dim() >= 2:
                scale = 0.5 if "embed" in weight_name or "wte" in weight_name else 0.25
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
            elif "sinks" in weight_name:
                weight.copy_(torch.randn(weight.shape, generator=generator))
    return model
