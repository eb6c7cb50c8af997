"""The tiny models of all tests: random weights, one function for each kind, each built only once.

What a function returns is a copy, for a test to change as it likes; its template is built at the
first call in a process. Benchmarks have larger models of their own (`recipes.benchmarks.models`).
"""

from __future__ import annotations

import copy
import functools
import json

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import kvtool
from kvtool.cache.features.repetition import Instructions, Repetition
from kvtool.transformers_versions import eager_families

SINK = 1  # the token that attracts queries
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "bos_token_id": SINK,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
BASE = SIZES | {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
ALL, FIRST = 0, 1  # channels of the hidden state: "a token", "the first token"
SLOW = 7  # a dimension of each head that RoPE hardly turns
PULL = {"llama": (0.7, 4.0, 5.0), "qwen3": (0.6, 5.0, 6.0)}  # to the first token, by layer
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
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
SHARING = {"layer_types": HYBRID, "num_kv_shared_layers": 2}

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
    "gemma3n": ("gemma3n_text", GEMMA | PER_LAYER | SHARING),
    "gemma4": ("gemma4_text", GEMMA | PER_LAYER | SHARING | {"global_head_dim": 32}),
    "llama4": (
        "llama4_text",
        EXPERTS | {"head_dim": 16, "attention_chunk_size": 24, "no_rope_layer_interval": 2},
    ),
}
RECURRENT = ("qwen3_next", "falcon_h1", "lfm2")
HOOKED = eager_families()


def peaky_model(family: str, kernel: str = "sdpa", **changes) -> PreTrainedModel:
    """A random model of 2 layers with large queries and keys; many attend to the token `SINK`."""
    return copy.deepcopy(_peaky(family, kernel, json.dumps(changes)))


@functools.cache
def _peaky(family: str, kernel: str, changes: str) -> PreTrainedModel:
    sizes = SIZES | GROUPED | {"num_hidden_layers": 2}
    config = AutoConfig.for_model(family, **(sizes | json.loads(changes)))
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


@functools.cache
def anchored_model(family: str, layers: int = 3) -> PreTrainedModel:
    """A Llama or Qwen3 whose first token attracts every query, more so in higher layers.

    The one model that is shared, not copied: the oracles read its weights.
    """
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **SIZES, **GROUPED, num_hidden_layers=layers)
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


def family_model(name: str) -> PreTrainedModel:
    """A random model of a supported family, whose attention is not uniform; eager attention."""
    kind, changes = FAMILIES[name]
    return copy.deepcopy(_family(kind, json.dumps(changes)))


@functools.cache
def _family(kind: str, changes: str) -> PreTrainedModel:
    settings = {} if kind == "gptj" else BASE
    config = AutoConfig.for_model(kind, **(settings | {"vocab_size": 96} | json.loads(changes)))
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


def random_ids(length: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    """Token ids, (batch, length), that begin with the sink token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, SIZES["vocab_size"], (batch, length), generator=generator)
    ids[:, 0] = SINK
    return ids


def prompt(length: int, seed: int = 0) -> list[int]:
    """The sink token, then random ones."""
    source = torch.Generator().manual_seed(seed)
    rest = torch.randint(2, SIZES["vocab_size"], (length - 1,), generator=source).tolist()
    return [SINK, *rest]


def cutting(base):
    """A base of the table that cuts a prompt, too, where by itself it keeps all of it."""
    return f"{base}(prompt=false)" if kvtool.parse_policy(base).score.keeps_prompt else base


def any_cache(model, policy, budget=None, prefill="full", **options):
    """Any policy's empty cache, without blocks where they are refused, with instructions."""
    parsed = kvtool.parse_policy(policy)
    whole = parsed.repetition is not None or parsed.shown_queries > 0
    mode = "full" if whole else prefill
    return instructed(kvtool.build_cache(model, policy, budget, prefill=mode, **options))


def instructed(cache):
    """The cache, which repeats prompts by tokens that say nothing, if its policy has it repeat."""
    part = Repetition.of(cache)
    if part is not None:
        part.instruct(Instructions((5, 9, 2), (7, 3)))
    return cache
