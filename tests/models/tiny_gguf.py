"""A tiny Llama as a GGUF file, and llama.cpp's rule for its tokens in plain Python."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import regex
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTES = bytes_to_unicode()
MERGES = ["Ġ Ġ", "ĠĠ Ġ", "Ċ Ġ", "t h", "Ġ t", "Ġt h", "Ġth e", "1 2", "Ġ 7", "i n", "Ġ s", "Ġs e"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *BYTES.values(), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAYERS, HEADS, KV_HEADS, WIDTH, INNER, LONGEST, BASE = 2, 4, 2, 64, 96, 2048, 50000.0
NAMES = {  # of ggml, and of transformers
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def tiny_model() -> LlamaForCausalLM:
    """The model that `write` writes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=LONGEST,
        rope_theta=BASE,
        rms_norm_eps=1e-5,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Put the channels of a head into llama.cpp's order: those turned together are neighbours."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def write(
    path: Path,
    *,
    pre: str | None = "smollm",
    architecture: str = "llama",
    packed: bool = False,
    changes: dict[str, Any] | None = None,
    more: Iterable[str] = (),
) -> Path:
    """Write the tiny model.

    Args:
        pre: the name of the rule that splits text.
        packed: round the weights to 8 bits, in blocks.
        changes: settings to add, by name.
        more: names of further tensors, of 8 ones each.
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(LONGEST)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(BASE)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, value in (changes or {}).items():
        (writer.add_uint16 if isinstance(value, int) else writer.add_string)(name, value)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, weight in _tensors(tiny_model()):
        if packed and weight.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    for name in more:
        writer.add_tensor(name, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: LlamaForCausalLM) -> Iterable[tuple[str, np.ndarray]]:
    weights = {name: each.numpy() for name, each in model.state_dict().items()}
    yield "token_embd.weight", weights["model.embed_tokens.weight"]
    yield "output_norm.weight", weights["model.norm.weight"]
    for layer in range(LAYERS):
        for ours, theirs in NAMES.items():
            weight = weights[f"model.layers.{layer}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):
                weight = permuted(weight, HEADS if ours == "attn_q" else KV_HEADS)
            yield f"blk.{layer}.{ours}.weight", weight


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def llama_cpp_tokens(text: str, *, digits_alone: bool = True) -> list[int]:
    """Tokens as llama.cpp's rule `smollm` (or `gpt-2`) gives them.

    Its expressions cut a text one after the other: each one cuts the pieces that those before it
    have left. Within a piece the earliest merge of the list goes first.
    """
    pieces = regex.findall(r"\p{N}|\P{N}+", text) if digits_alone else [text]
    words = [word for piece in pieces for word in regex.findall(_GPT2, piece)]
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(MERGES)}
    ids = []
    for word in words:
        parts = [BYTES[byte] for byte in word.encode()]
        while True:
            pairs = {pair: ranks[pair] for pair in itertools.pairwise(parts) if pair in ranks}
            if not pairs:
                break
            best = min(pairs, key=pairs.__getitem__)
            i = next(i for i in range(len(parts) - 1) if (parts[i], parts[i + 1]) == best)
            parts[i : i + 2] = ["".join(best)]
        ids += [TOKENS.index(part) for part in parts]
    return ids
