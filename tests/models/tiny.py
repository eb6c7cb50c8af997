"""Tiny configurations of every causal language model that transformers has.

A configuration gets the small sizes among `SIZES` that it has fields for, and those of its parts;
`CHANGES` says what a family needs besides. Random weights are spread widely, so that attention is
not uniform.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

WINDOW = 12
VOCABULARY = 96
LAYERS = 4
MOST_WEIGHTS = 40_000_000

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "d_inner": 96,
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_layers": LAYERS,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
    "state_size": 8,
    "chunk_size": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "is_decoder": True,
    "attention_dropout": 0.0,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
}

LATENT = {"num_key_value_heads": 4, "head_dim": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
WHOLE = {"sliding_window": None}
CONVOLVING = {"layer_types": ["conv", "full_attention"] * 2}
RECURRENT = {"layer_types": ["linear_attention", "full_attention"] * 2}
SHARING = {
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
}
BORROWING = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": LAYERS,
}
TURNS = {"rope_type": "default", "rope_theta": 10000.0}
SPACED = {"rope_parameters": TURNS | {"mrope_section": [2, 3, 3]}}
LOOKS = {"depth": 2, "out_hidden_size": 64}
CHANGES: dict[str, dict[str, Any]] = {
    "axk1": LATENT,
    "axk2": LATENT,
    "bailing_hybrid": LATENT | {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": MIXED
    | {"rope_parameters": {"sliding_attention": TURNS, "full_attention": TURNS}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3": MIXED | {"vision_config": {"image_size": 112, "patch_size": 14}},
    "gemma3_text": MIXED,
    "gemma3n": SHARING,
    "gemma3n_text": SHARING,
    "gemma4": SHARING,
    "gemma4_assistant": BORROWING,
    "gemma4_text": SHARING,
    "gemma4_unified": SHARING,
    "gemma4_unified_assistant": BORROWING,
    "gemma4_unified_text": SHARING,
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": RECURRENT,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": LATENT | RECURRENT,
    "kolibri1": MIXED,
    "lfm2": CONVOLVING,
    "lfm2_moe": CONVOLVING,
    "lfm3": CONVOLVING,
    "llama4": {"no_rope_layer_interval": 2},
    "llama4_text": {"no_rope_layer_interval": 2},
    "longcat_flash": LATENT | {"ffn_hidden_size": 96, "expert_ffn_hidden_size": 32},
    "minicpm3": LATENT,
    "ministral": MIXED,
    "ministral3": WHOLE,
    "mistral": WHOLE,
    "mixtral": WHOLE,
    "phi3": WHOLE,
    "phi4_multimodal": WHOLE,
    "phimoe": WHOLE,
    "qwen2_5_vl": SPACED | {"vision_config": LOOKS | {"fullatt_block_indexes": [0]}},
    "qwen3_vl": SPACED | {"vision_config": LOOKS | {"deepstack_visual_indexes": [0]}},
    "recurrent_gemma": {"attention_window_size": WINDOW},
    "reformer": {"axial_pos_embds": False},
    "starcoder2": WHOLE,
    "youtu": LATENT,
    "xlm": {"emb_dim": 64},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 8, "num_key_value_heads": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs besides; of its text where it has one."""


PARTS = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}
"""The text of families whose configuration cannot be made without one."""


def families() -> list[str]:
    """Name the types of all causal language models, in alphabetical order."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(kind: str) -> PreTrainedConfig:
    """Make a tiny configuration of a family."""
    return _config(CONFIG_MAPPING[kind], CHANGES.get(kind, {}))


def _config(made: type[PreTrainedConfig], changes: dict[str, Any]) -> PreTrainedConfig:
    fields = {field.name for field in dataclasses.fields(made)}
    own = {name: size for name, size in SIZES.items() if name in fields}
    parts = {name: _part(made, name) for name in made.sub_configs}
    for name, part in parts.items():
        own[name] = _config(part, changes if name == "text_config" else changes.get(name, {}))
    rest = {name: change for name, change in changes.items() if name not in parts}
    return made(**(own if "text_config" in parts else own | rest))


def _part(made: type[PreTrainedConfig], name: str) -> type[PreTrainedConfig]:
    part = made.sub_configs[name]
    if part is not AutoConfig:
        return part
    own = PARTS.get(made.model_type)
    return type(getattr(made(), name)) if own is None else CONFIG_MAPPING[own]


def tiny_model(
    config: PreTrainedConfig, kernel: str = "eager", auto: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """Make a model of random weights, the same ones for the same configuration."""
    with torch.device("meta"):
        sketch = auto.from_config(copy.deepcopy(config))
    weights = sum(weight.numel() for weight in sketch.parameters())
    if weights > MOST_WEIGHTS:
        raise ValueError(f"{weights:,} weights are not tiny")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the decay of a recurrence is drawn at construction, and stays
        own = copy.deepcopy(config)  # in which the attention of the model is noted
        model = auto.from_config(own, attn_implementation=kernel).eval()
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "conv" not in name:
                embeds = "embed" in name or "wte" in name
                scale = 0.5 if embeds else 2 / weight.shape[-1] ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=source) * scale)
            elif "sinks" in name:
                weight.copy_(torch.randn(weight.shape, generator=source))
    return model


def takes(model: PreTrainedModel, name: str) -> bool:
    """Say whether a model's forward takes an argument."""
    return name in inspect.signature(model.forward).parameters
