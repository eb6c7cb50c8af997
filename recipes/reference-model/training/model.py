"""The model that a training run begins with: random weights, a checkpoint's, or those grown."""

import argparse

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvtool.errors import KvtoolError
from kvtool.models.reference.vocabulary import BOS, EOS, PAD, TOKENS
from training.grow import grow
from training.tokenizer import MAX_TOKENS


def first_model(options: argparse.Namespace) -> LlamaForCausalLM:
    """Build or load the model of a run's options.

    Raises:
        KvtoolError: there is nothing to start from or to grow.
    """
    if not options.init:
        if options.grow is not None:
            raise KvtoolError("--grow needs a model to grow: --init FOLDER")
        return new_model(options)
    if not options.init.is_dir():
        raise KvtoolError(f"no folder `{options.init}` to start from")
    model = AutoModelForCausalLM.from_pretrained(options.init, dtype=torch.float32)
    return model if options.grow is None else grow(model, options.grow, options.seed)


def new_model(options: argparse.Namespace) -> LlamaForCausalLM:
    """Build a Llama with random weights."""
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        head_dim=options.head_dim,
        max_position_embeddings=MAX_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config)
