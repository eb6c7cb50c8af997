"""Models of transformers as GGUF files in float32, without a vocabulary or with a tokenizer's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from tests.models.tiny_gguf import NAMES, permuted

MORE = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
PAIRED = ("llama",)


def write(path: Path, model: PreTrainedModel, tokenizer=None) -> Path:
    """Write a Llama, Qwen2 or Qwen3."""
    import gguf

    config, kind = model.config, model.config.model_type
    head_dim = model.model.layers[0].self_attn.head_dim
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        _add_tokenizer(writer, tokenizer, config)
    weights = {name: each.float().numpy() for name, each in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    if not config.tie_word_embeddings:
        writer.add_tensor("output.weight", weights["lm_head.weight"])
    for layer in range(config.num_hidden_layers):
        for ours, theirs in (NAMES | MORE).items():
            for end in ("weight", "bias"):
                weight = weights.get(f"model.layers.{layer}.{theirs}.{end}")
                if weight is None:
                    continue
                if ours in ("attn_q", "attn_k") and kind in PAIRED:
                    keys = ours == "attn_k"
                    heads = config.num_key_value_heads if keys else config.num_attention_heads
                    weight = permuted(weight, heads)
                writer.add_tensor(f"blk.{layer}.{ours}.{end}", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer, tokenizer, config) -> None:
    """Add a byte-level BPE tokenizer."""
    import json

    data = json.loads(tokenizer.backend_tokenizer.to_str())
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    special = {each["id"]: each for each in data["added_tokens"]}
    count = config.vocab_size
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if config.model_type == "qwen2" else "smollm")
    writer.add_token_list([names.get(i, f"[PAD{i}]") for i in range(count)])
    kinds = [1 if i in names else 5 for i in range(count)]
    for i, each in special.items():
        kinds[i] = 3 if each["special"] else 4
    writer.add_token_types(kinds)
    merges = data["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_add_bos_token(False)
    ends = config.eos_token_id
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
